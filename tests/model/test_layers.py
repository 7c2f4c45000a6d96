# SPDX-License-Identifier: Apache-2.0
"""Any range of a model's layers runs on any tokens, as the model itself would run it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors

from tests.prefill.hooks import pre_hooks
from tests.prefill.tiny import CHANNELS, HIDDEN, KV_HEADS, LAYERS, SIZE, World
from vllm_segreuse.model.layer_state import Collected, LayerState
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.model.modules import UnsupportedModelError, in_the_place_of
from vllm_segreuse.prefill.tokens import TokenTable

TABLES = torch.arange(10, dtype=torch.int32)[None]
WITHOUT_ADAPTER: Any = SimpleNamespace(lora_id=0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def tokens() -> TokenTable:
    positions = torch.tensor([0, 1, 2, 3, 4, 6, 9])
    return TokenTable(positions + 11, positions, torch.zeros_like(positions), positions)


def attending(world: World):
    return world.layers.attention.forward_context(tokens(), TABLES)


def test_ranges_of_layers_one_behind_the_other_are_the_model(world: World) -> None:
    given = tokens()
    with attending(world):
        whole = world.stack.forward(given.token_ids, given.positions)
    written = [cache.clone() for cache in world.caches]
    for cut in range(LAYERS + 1):
        with attending(world):
            state, inputs = world.stack.embed(given.token_ids, given.positions)
            state = world.stack.run(0, cut, inputs, state)
            state = world.stack.run(cut, LAYERS, inputs, state)
        assert state.residual is not None
        stream = state.hidden_states + state.residual
        torch.testing.assert_close(stream / stream.square().mean(-1, True).sqrt(), whole)
        assert all(map(torch.equal, world.caches, written))


def test_embeddings_are_what_enters_the_first_layer_and_write_nothing(world: World) -> None:
    given, before = tokens(), [cache.clone() for cache in world.caches]
    with attending(world):
        state, _ = world.stack.embed(given.token_ids, given.positions)
    expected = world.model.tokens(given.token_ids) + world.model.positions(given.positions)
    assert torch.equal(state.hidden_states, expected)
    assert state.residual is None
    assert all(map(torch.equal, world.caches, before))
    assert not any("forward" in vars(layer) for layer in world.stack.layers)


def test_keys_and_values_are_those_that_the_layer_would_write(world: World) -> None:
    given, layer = tokens(), 2
    with attending(world):
        state, inputs = world.stack.embed(given.token_ids, given.positions)
        state = world.stack.run(0, layer, inputs, state)
        before = [cache.clone() for cache in world.caches]
        entered = state.clone()
        [(_, found)] = world.layers.keys_and_values(layer, given, state, WITHOUT_ADAPTER)
        assert torch.equal(state.hidden_states, entered.hidden_states), "it is needed once more"
        assert state.residual is not None
        assert entered.residual is not None
        assert torch.equal(state.residual, entered.residual)
        assert all(map(torch.equal, world.caches, before)), "no page is written"
        assert not pre_hooks(world.stack.attention[layer])
        world.stack.write_kv(layer, inputs, given.slots, entered)
    for part, rows in enumerate(found):
        assert rows.shape == (len(given), KV_HEADS, CHANNELS)
        pages = world.caches[layer][given.slots // SIZE, part, :, given.slots % SIZE]
        assert torch.equal(rows, pages)
    for index, (cache, saved) in enumerate(zip(world.caches, before, strict=True)):
        assert torch.equal(cache, saved) == (index != layer)


def test_an_error_in_the_model_leaves_no_hook(world: World) -> None:
    given = tokens()
    with attending(world):
        state, inputs = world.stack.embed(given.token_ids, given.positions)
        del world.model.tokens
        with pytest.raises(AttributeError, match="tokens"):
            world.stack.embed(given.token_ids, given.positions)
        del world.stack.layers[1].query
        with pytest.raises(AttributeError, match="query"):
            world.stack.keys_and_values(1, inputs, state)
    assert not any("forward" in vars(layer) for layer in world.stack.layers)
    assert not pre_hooks(world.stack.attention[1])


def test_the_model_gets_tensors_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code takes types for granted, and may write over what it is given."""
    seen: dict[str, torch.Tensor] = {}

    class Stub(nn.Module):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            seen.update(input_ids=input_ids, positions=positions)
            return torch.zeros(len(positions), 4)

    stub = Stub()
    monkeypatch.setattr(world.model, "forward", stub.forward)
    for dtype in (torch.int32, torch.int64):
        ids, positions = torch.arange(5, dtype=dtype), torch.arange(5)
        world.stack.forward(ids, positions)
        assert seen["input_ids"].dtype == torch.int32
        assert seen["positions"].dtype == torch.int64
        assert torch.equal(seen["input_ids"].long(), ids.long())
        assert seen["input_ids"].data_ptr() != ids.data_ptr()
        assert seen["positions"].data_ptr() != positions.data_ptr()


@pytest.mark.parametrize("residual", [True, False])
def test_states_of_chunks_are_put_where_they_belong(residual: bool) -> None:
    whole = LayerState(torch.randn(7, 3), torch.randn(7, 3) if residual else None)
    for size in (1, 3, 6, 7, 100):
        collected = Collected(7)
        for begin in range(0, 7, size):
            part = slice(begin, begin + size)
            collected.add(part, whole.take(torch.arange(7)[part]))
        assert torch.equal(collected.state.hidden_states, whole.hidden_states)
        if residual:
            assert collected.state.residual is not None
            assert whole.residual is not None
            assert torch.equal(collected.state.residual, whole.residual)
        else:
            assert collected.state.residual is None


def test_states_of_chunks_take_the_place_of_what_entered() -> None:
    """Also of layers that add to what they were given, and return it as the other half."""
    whole = LayerState(torch.randn(7, 3), torch.randn(7, 3))
    before = whole.clone()
    collected = Collected(7, before)
    for begin in range(0, 7, 3):
        part = slice(begin, begin + 3)
        added = before.hidden_states[part].copy_(whole.residual[part])  # type: ignore[index]
        collected.add(part, LayerState(whole.hidden_states[part], added))
    found = collected.state
    assert found.hidden_states is before.hidden_states
    assert found.residual is before.residual
    assert torch.equal(found.hidden_states, whole.hidden_states)
    assert torch.equal(found.residual, whole.residual)  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_states_that_are_kept_take_the_place_of_all(at_once: int) -> None:
    whole, rows = LayerState(torch.randn(7, 3), torch.randn(7, 3)), torch.tensor([0, 2, 3, 6])
    expected, hidden_states = whole.take(rows), whole.hidden_states
    found = whole.kept(rows, at_once)
    assert torch.equal(found.hidden_states, expected.hidden_states)
    assert torch.equal(found.residual, expected.residual)  # type: ignore[arg-type]
    assert found.hidden_states.data_ptr() == hidden_states.data_ptr()


def rows_of(state: LayerState) -> tuple[list[float], list[float] | None]:
    residual = None if state.residual is None else state.residual[:, 0].tolist()
    return state.hidden_states[:, 0].tolist(), residual


@pytest.mark.parametrize(("left", "right"), [(True, True), (True, False), (False, True)])
def test_states_follow_each_other_with_their_residuals_if_both_have_one(
    left: bool, right: bool
) -> None:
    column = torch.tensor([[1.0], [2.0]])
    one = LayerState(column, 10 * column if left else None)
    other = LayerState(3 * column, 30 * column if right else None)
    hidden_states, residual = rows_of(one.followed_by(other))
    assert hidden_states == [1, 2, 3, 6]
    assert residual == ([10, 20, 30, 60] if left and right else None)


def test_the_residual_stream_is_both_added_up() -> None:
    column = torch.tensor([[1.0], [2.0]])
    both, alone = LayerState(column.clone(), 10 * column), LayerState(column.clone(), None)
    assert both.stream.flatten().tolist() == [11, 22]
    assert alone.stream is alone.hidden_states
    hidden_states = both.hidden_states
    assert rows_of(both.summed()) == ([11, 22], None)
    assert both.summed().hidden_states is hidden_states, "in the place of these"
    assert alone.summed() is alone
    copied = LayerState(column, 10 * column).clone()
    column.zero_()
    assert rows_of(copied) == ([1, 2], [10, 20])


def test_a_stream_enters_as_the_layer_adds_it_up(world: World) -> None:
    """The first layer is given no residual."""
    stream = torch.ones(2, HIDDEN)
    first, second = (world.stack.state_of(stream, index) for index in (0, 1))
    assert first.residual is None
    assert first.hidden_states is stream
    assert second.residual is stream
    assert torch.equal(second.hidden_states, torch.zeros(2, HIDDEN))


class Plain(nn.Module):
    """A decoder layer without a residual of its own; some return a tuple."""

    def __init__(self, attention: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self.attn, self.in_tuple = attention, in_tuple

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, scale: float = 1.0):
        out = hidden_states * scale + positions[:, None]
        return (out, None) if self.in_tuple else out


class PlainModel(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = input_ids[:, None].float().expand(-1, HIDDEN)
        for layer in self.layers:
            hidden = layer(positions, hidden, scale=2.0)
        return hidden


@pytest.mark.parametrize("in_tuple", [False, True])
def test_layers_without_a_residual_get_what_the_model_hands_them(in_tuple: bool) -> None:
    """Further arguments of the first layer are those of all."""
    attention = [nn.Identity() for _ in range(3)]
    model = PlainModel([Plain(a, in_tuple) for a in attention])
    stack = DecoderStack(model, {str(i): a for i, a in enumerate(attention)})
    ids, positions = torch.tensor([5, 7]), torch.tensor([1, 4])
    state, inputs = stack.embed(ids, positions)
    state = stack.run(0, 2, inputs, state)
    assert state.residual is None
    assert state.hidden_states[:, 0].tolist() == [(5 * 2 + 1) * 2 + 1, (7 * 2 + 4) * 2 + 4]


def test_a_model_of_another_shape_is_refused() -> None:
    def stack(layers: list[nn.Module], attention: list[nn.Module]) -> DecoderStack:
        return DecoderStack(PlainModel(layers), {str(i): a for i, a in enumerate(attention)})

    class Other(nn.Module):
        def __init__(self, *attention: nn.Module) -> None:
            super().__init__()
            for number, part in enumerate(attention):
                self.add_module(f"part{number}", part)

        def forward(self, x: Any) -> Any:
            return x

    one, two, three = (nn.Identity() for _ in range(3))
    with pytest.raises(UnsupportedModelError, match=r"Other.forward takes \(x\) and no positions"):
        stack([Other(one)], [one])

    class Half(Other):
        def forward(self, positions: Any) -> Any:
            return positions

    with pytest.raises(UnsupportedModelError, match=r"Half.forward takes \(positions\), not"):
        stack([Half(one)], [one])
    expected = r"PlainModel has no list of decoder layers with one attention layer each \({} att"
    for layers, attention in (
        ([Plain(one, False)], [one, two]),
        ([Plain(one, False), Plain(two, False), Other()], [one, two]),
        ([Other(one, two), Other()], [one, two]),
        ([Other(one, two), Other(one)], [one, two]),
        ([Plain(one, False), Plain(two, False)], [one, two, three]),
    ):
        with pytest.raises(UnsupportedModelError, match=expected.format(len(attention))):
            stack(layers, attention)


class PerToken(Plain):
    """A layer that is given something else of each token, too."""

    def forward(self, positions: Any, hidden_states: Any, deep: Any = None, scale: Any = 1) -> Any:
        return hidden_states


@pytest.mark.parametrize("rows", [1, 2])
def test_layers_that_take_more_of_each_token_are_refused_without_a_residual(rows: int) -> None:
    """What a layer returns is not known before it has run."""
    attention = nn.Identity()

    class Model(PlainModel):
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.layers[0](positions, input_ids, deep=input_ids[:rows], scale=3)

    stack = DecoderStack(Model([PerToken(attention, False)]), {"0": attention})
    with pytest.raises(
        UnsupportedModelError,
        match=r"^PerToken.forward takes more than hidden states of each token \(deep\)$",
    ):
        stack.embed(torch.tensor([1, 2]), torch.tensor([0, 1]))


class Gated(nn.Module):
    """A layer that adds an input of its own for each token, and may share KV."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn = attention
        self.seen: list[torch.Tensor] = []

    def forward(
        self, positions: Any, hidden_states: Any, residual: Any, own: Any = None
    ) -> tuple[Any, Any]:
        self.seen.append(hidden_states)
        return hidden_states + own[:, None] * positions[:, None], None


class GatedModel(nn.Module):
    """Gives layer n the token's id times ten to the power of n."""

    def __init__(self, attention: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(each) for each in attention)
        self.later = -1

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = torch.zeros(len(input_ids), 1), None
        own = input_ids[:, None] * 10 ** torch.arange(len(self.layers))
        for index, layer in enumerate(self.layers):
            rows = own[:, index] if index != self.later else own[:1, index]
            hidden, residual = layer(positions, hidden, residual, own=rows)
        return -hidden


def gated(count: int, sharing: tuple[int, ...] = ()) -> tuple[GatedModel, DecoderStack]:
    attention = [nn.Identity() for _ in range(count)]
    names = {str(i): layer for i, layer in enumerate(attention)}
    shared = {str(i): names.pop(str(i)) for i in sharing}
    model = GatedModel(attention)
    return model, DecoderStack(model, names, sharing=shared)


def test_each_layer_is_given_what_the_model_gives_it_of_the_tokens_at_hand() -> None:
    model, stack = gated(3)
    ids, positions = torch.tensor([5, 7, 2]), torch.tensor([1, 4, 9])
    state, inputs = stack.embed(ids, positions)
    whole = stack.run(0, 3, inputs, state).hidden_states[:, 0].tolist()
    assert whole == [555, 777 * 4, 222 * 9]
    entered = stack.run(0, 1, inputs, state)
    rows = torch.tensor([2, 0])
    some = stack.inputs(ids[rows], positions[rows])
    assert stack.run(1, 3, some, entered.take(rows)).hidden_states[:, 0].tolist() == [222 * 9, 555]
    for layer in model.layers:
        layer.seen.clear()
    stack.embed(ids, positions)
    assert not any(layer.seen for layer in model.layers), "nothing is computed"


def test_what_enters_a_layer_is_reported_when_it_is_computed_and_not_before() -> None:
    _, stack = gated(3)
    found: list[list[float]] = []
    stack.report_input(1, lambda _, state: found.append(state.hidden_states[:, 0].tolist()))
    ids, positions = torch.tensor([5, 7]), torch.tensor([1, 4])
    state, inputs = stack.embed(ids, positions)
    stack.inputs(ids, positions)
    assert found == []
    stack.run(0, 2, inputs, state)
    assert found == [[5, 28]]


def test_inputs_that_are_not_of_each_token_are_refused_at_whichever_layer() -> None:
    model, stack = gated(3)
    model.later = 2
    with pytest.raises(UnsupportedModelError, match=r"^Gated.forward takes more .*\(own\)$"):
        stack.embed(torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_layers_that_share_kv_are_behind_the_stack_and_not_run() -> None:
    model, stack = gated(5, sharing=(3, 4))
    assert len(stack) == 3
    assert stack.layers == list(model.layers[:3])
    assert stack.attention == [layer.attn for layer in stack.layers]
    assert stack.behind == list(model.layers[3:])
    ids, positions = torch.tensor([5, 7]), torch.tensor([1, 4])
    state, inputs = stack.embed(ids, positions)
    run = stack.run(0, 3, inputs, state).hidden_states
    assert torch.equal(stack.forward(ids, positions), run), "what enters the first that shares"
    assert not any(layer.seen for layer in stack.behind)
    assert model(ids, positions)[:, 0].tolist() == [-55555, -77777 * 4], "nothing is left behind"


def test_layers_that_write_kv_behind_one_that_shares_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"^2 shares the KV of another layer, and layers behind it write theirs$",
    ):
        gated(4, sharing=(2,))


class Batched(nn.Module):
    """A layer of the Transformers backend: a batch of one, and what to rotate by in a tuple."""

    def __init__(self, attention: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        self.attn, self.in_tuple, self.seen = attention, in_tuple, 0

    def forward(
        self, hidden_states: Any, position_ids: Any = None, mask: Any = None, **further: Any
    ) -> Any:
        assert hidden_states.ndim == 3
        assert len(hidden_states) == 1
        self.seen += 1
        cosine, sine = further["position_embeddings"]
        out = 2 * hidden_states + (cosine + sine + position_ids)[..., None]
        return (out, None) if self.in_tuple else out


class BatchedModel(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = input_ids.float()[None, :, None]
        for number, layer in enumerate(self.layers):
            turns = (positions * 10**number, positions * 100)
            hidden = layer(
                hidden,
                position_ids=positions[None],
                position_embeddings=tuple(each[None] for each in turns),
                cached=False,
            )
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden[0]


def batched(in_tuple: bool = False) -> tuple[BatchedModel, DecoderStack]:
    attention = [nn.Identity() for _ in range(3)]
    model = BatchedModel([Batched(each, in_tuple) for each in attention])
    return model, DecoderStack(model, {str(i): each for i, each in enumerate(attention)})


@pytest.mark.parametrize("in_tuple", [False, True])
def test_layers_that_take_a_batch_of_one_and_no_positions_are_run_as_the_model_does(
    in_tuple: bool,
) -> None:
    model, stack = batched(in_tuple)
    assert not stack.takes_positions
    ids, positions = torch.tensor([5, 7, 2]), torch.tensor([1, 4, 9])
    whole = stack.forward(ids, positions)
    runs = [layer.seen for layer in model.layers]
    state, inputs = stack.embed(ids, positions)
    assert [layer.seen for layer in model.layers] == runs, "nothing is computed"
    assert state.hidden_states.tolist() == [[5], [7], [2]]
    assert torch.equal(stack.run(0, 3, inputs, state).hidden_states, whole)
    entered, rows = stack.run(0, 1, inputs, state), torch.tensor([2, 0])
    some = stack.inputs(ids[rows], positions[rows])
    assert torch.equal(stack.run(1, 3, some, entered.take(rows)).hidden_states, whole[rows])
    assert torch.equal(stack.output(ids, positions, stack.run(0, 3, inputs, state)), whole)


def test_what_a_layer_returns_must_be_known_before_one_stands_in_for_it() -> None:
    _, stack = batched()
    with pytest.raises(UnsupportedModelError, match=r"\(position_ids, position_embeddings\)$"):
        stack.embed(torch.tensor([5, 7]), torch.tensor([1, 4]))


def test_layers_without_positions_report_no_input() -> None:
    _, stack = batched()
    with pytest.raises(UnsupportedModelError, match="takes no positions by which what enters it"):
        stack.report_input(1, lambda *_: None)


def test_a_forward_that_was_replaced_is_replaced_again_and_put_back() -> None:
    layer = nn.Identity()
    with in_the_place_of([layer], lambda _: 1):
        with in_the_place_of([layer], lambda _: 2):
            assert layer(0) == layer.forward(0) == 2
        assert layer(0) == 1
    assert layer(0) == 0
    assert "forward" not in vars(layer)


class Staged(PlainModel):
    """One of two pipeline stages: layers of the other are placeholders, and states come in and go
    out as in vLLM's models."""

    def __init__(self, layers: list[nn.Module], is_first: bool) -> None:
        super().__init__(layers)
        self._is_first = is_first
        self.names = ["hidden_states"]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        assert (intermediate_tensors is None) is self._is_first
        if intermediate_tensors is None:
            hidden = input_ids[:, None].float().expand(-1, HIDDEN)
        else:
            hidden = intermediate_tensors["hidden_states"]
        for layer in self.layers:
            if not isinstance(layer, PPMissingLayer):
                hidden = layer(positions, hidden, scale=2.0)
        return IntermediateTensors({"hidden_states": hidden}) if self._is_first else hidden

    def make_empty_intermediate_tensors(self, batch_size: int, **how: Any) -> IntermediateTensors:
        return IntermediateTensors(
            {name: torch.zeros(batch_size, HIDDEN, **how) for name in self.names}
        )


class AskingModel(PlainModel):
    """As InternLM2: what another stage would hand on has no default."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: None
    ) -> torch.Tensor:
        assert intermediate_tensors is None
        return super().forward(input_ids, positions)


def test_a_model_that_asks_what_another_stage_hands_on_is_told_that_there_is_none() -> None:
    attention = nn.Identity()
    layers, named = [Plain(attention, False)], {"0": attention}
    ids, positions = torch.tensor([5, 7]), torch.tensor([1, 4])
    expected = DecoderStack(PlainModel(layers), named).forward(ids, positions)
    found = DecoderStack(AskingModel(layers), named).forward(ids, positions)
    assert torch.equal(found, expected)


def test_stages_run_what_they_have_on_what_they_are_given() -> None:
    attention = [nn.Identity() for _ in range(3)]
    layers = [Plain(each, False) for each in attention]
    named = {str(i): each for i, each in enumerate(attention)}
    ids, positions = torch.tensor([5, 7]), torch.tensor([1, 4])
    whole = DecoderStack(PlainModel(layers), named)
    expected = whole.forward(ids, positions)

    missing = PPMissingLayer()
    first = DecoderStack(
        Staged([*layers[:2], missing], is_first=True), dict(list(named.items())[:2]), hands_on=True
    )
    last = DecoderStack(Staged([missing, missing, layers[2]], is_first=False), {"2": attention[2]})
    assert (len(first), len(last)) == (2, 1)
    handed = first.forward_to_next(ids, positions)
    assert torch.equal(first.forward(ids, positions), handed.hidden_states)
    state, inputs = first.embed(ids, positions)
    by_layers = first.run(0, 2, inputs, state)
    assert torch.equal(by_layers.hidden_states, handed.hidden_states)
    with last.given(handed.clone()):
        assert torch.equal(last.forward(ids, positions), expected)
    with last.given(handed.clone()):
        state, inputs = last.embed(ids, positions)
    assert torch.equal(last.run(0, 1, inputs, state).hidden_states, expected)
    with pytest.raises(AssertionError):
        last.forward(ids, positions)  # nothing is left of what it was given


def test_a_model_that_hands_on_more_than_states_is_refused() -> None:
    attention = nn.Identity()
    model = Staged([Plain(attention, False)], is_first=True)
    stack = DecoderStack(model, {"0": attention}, hands_on=True)
    sample = stack.sample_of_handed(torch.bfloat16, torch.device("cpu"))
    assert sample.hidden_states.dtype == torch.bfloat16
    assert (sample.hidden_states.shape, sample.residual) == ((1, HIDDEN), None)
    model.names = ["hidden_states", "residual"]
    assert list(stack.sample_of_handed(torch.float32, torch.device("cpu")).tensors) == model.names
    model.names = ["hidden_states", "altup"]
    with pytest.raises(UnsupportedModelError, match="Staged hands hidden_states, altup from one"):
        stack.sample_of_handed(torch.float32, torch.device("cpu"))
    alone = DecoderStack(PlainModel([Plain(attention, False)]), {"0": attention})
    with pytest.raises(UnsupportedModelError, match="PlainModel has no pipeline stages"):
        alone.sample_of_handed(torch.float32, torch.device("cpu"))
