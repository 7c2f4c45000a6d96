# SPDX-License-Identifier: Apache-2.0
"""KV of a draft is moved, and computed of the ids and states that vLLM's proposer would give it; a
mistake in any of that is found at start-up."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.prefill.loaded import LAYERS, POSITIONS, Loaded, loaded, refused
from vllm_segreuse.kernels.pages import PageLayout, TiledStrides
from vllm_segreuse.model.attention_kind import AttentionKind
from vllm_segreuse.model.drafts import Draft
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.plan import Pieces, Recipe, ReusePlan
from vllm_segreuse.prefill import checks
from vllm_segreuse.prefill.align import Aligner
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.drafts import DraftRunner
from vllm_segreuse.prefill.proofs import drafts as of_drafts
from vllm_segreuse.prefill.proofs import passes

Patch = pytest.MonkeyPatch
AUXILIARY = (1, 2)
METHODS = ("draft_model", "eagle", "eagle3")


class Head(nn.Module):
    """One decoder layer on a token and, of heads, states of the target."""

    def __init__(self, vllm_config: Any, states: int) -> None:
        from vllm.model_executor.models.llama import LlamaDecoderLayer

        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(config.hidden_size * (1 + states), config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(vllm_config, prefix=f"draft.layers.{LAYERS}")]
        )

    def combine_hidden_states(self, states: torch.Tensor) -> torch.Tensor:
        return 2 * states

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = [self.embed_tokens(input_ids)]
        if hidden_states is not None:
            given.append(hidden_states.clone())
            hidden_states.zero_()  # fused norms add up in place
        hidden, residual = self.layers[0](positions, self.fc(torch.cat(given, -1)), None)
        out: torch.Tensor = hidden + residual
        return out


def states_of(method: str) -> int:
    return {"draft_model": 0, "eagle": 1, "eagle3": len(AUXILIARY)}[method]


def drafter_of(model: Loaded, method: str, max_model_len: int = POSITIONS) -> Any:
    """As vLLM's proposer is, once it has loaded a draft."""
    return SimpleNamespace(
        model=model.draft,
        method=method,
        _draft_attn_layer_names={name for name in model.attention if name.startswith("draft.")},
        pass_hidden_states_to_model=method != "draft_model",
        eagle3_use_aux_hidden_state=method == "eagle3",
        draft_model_config=SimpleNamespace(max_model_len=max_model_len),
    )


@pytest.fixture(scope="module", params=METHODS)
def drafted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Loaded, str]]:
    """A model and what drafts for it."""
    method = request.param

    def made(vllm_config: Any) -> nn.Module:
        return Head(vllm_config, states_of(method))

    with loaded(tmp_path_factory.mktemp(method), draft=made) as model:
        if method == "eagle3":
            model.model.set_aux_hidden_state_layers(AUXILIARY)
        yield model, method


EAGLE = pytest.mark.parametrize("drafted", ["eagle"], indirect=True)
EAGLE3 = pytest.mark.parametrize("drafted", ["eagle3"], indirect=True)
HEADS = pytest.mark.parametrize("drafted", ["eagle", "eagle3"], indirect=True)


def proven(drafted: tuple[Loaded, str], **of_drafter: Any) -> checks.Runtime:
    model, method = drafted
    drafter = drafter_of(model, method, **of_drafter)
    return checks.prove(model.model, model.vllm_config, model.kv_cache_config, drafter=drafter)


def why_refused(drafted: tuple[Loaded, str], **of_drafter: Any) -> str:
    return refused(lambda: proven(drafted, **of_drafter))


OFF = "the sparse pass does not reproduce this model's own forward"


def test_a_sound_draft_is_proven(drafted: tuple[Loaded, str]) -> None:
    runtime = proven(drafted)
    assert runtime.max_deviation < 1e-5
    assert len(runtime.prefill.aligner.stored_pages()) == LAYERS + 1, "its KV is moved, too"
    assert runtime.prefill.layers.count == LAYERS, "it is none of the model's layers"


def test_kv_that_is_not_computed_is_found(drafted: tuple[Loaded, str], monkeypatch: Patch) -> None:
    def nothing(*_: Any) -> Iterator[int]:
        return iter(())

    monkeypatch.setattr(DraftRunner, "run", nothing)
    assert OFF in why_refused(drafted)


def test_kv_that_is_not_moved_is_found(drafted: tuple[Loaded, str], monkeypatch: Patch) -> None:
    made = Aligner.__init__
    monkeypatch.setattr(
        Aligner, "__init__", lambda self, layers, codec: made(self, layers[:LAYERS], codec)
    )
    assert "moved keys or values are not" in why_refused(drafted)


@HEADS
def test_ids_that_are_not_shifted_are_found(
    drafted: tuple[Loaded, str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Batch, "following", lambda self: self.tokens.token_ids)
    assert OFF in why_refused(drafted)


@EAGLE
def test_states_without_the_models_norm_are_found(
    drafted: tuple[Loaded, str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(DecoderStack, "output", lambda self, ids, at, state: state.stream)
    assert OFF in why_refused(drafted)


@EAGLE3
def test_states_of_other_layers_are_found(drafted: tuple[Loaded, str], monkeypatch: Patch) -> None:
    keep = Batch.keep_auxiliary
    monkeypatch.setattr(
        Batch,
        "keep_auxiliary",
        lambda self, layer, chunk, stream: keep(self, layer, chunk, 1.1 * stream),
    )
    assert OFF in why_refused(drafted)


@EAGLE3
def test_what_leaves_the_last_layer_is_refused(drafted: tuple[Loaded, str]) -> None:
    model, _ = drafted
    model.model.set_aux_hidden_state_layers((1, LAYERS))
    try:
        assert "what leaves the last of 3 layers ((1, 3))" in why_refused(drafted)
    finally:
        model.model.set_aux_hidden_state_layers(AUXILIARY)


def test_a_draft_of_few_positions_is_refused(drafted: tuple[Loaded, str]) -> None:
    # The last of 125 tokens, moved by 210, where the first is at position 1.
    needed = 1 + 124 + 210 + 1
    for few in (100, needed - 1):
        why = f"the draft takes {few} positions, the proof needs {needed}"
        assert why in why_refused(drafted, max_model_len=few)
    proven(drafted, max_model_len=needed)


def test_layers_that_are_not_run_are_refused(
    drafted: tuple[Loaded, str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Draft, "forward", lambda *_: None)
    assert f"draft.layers.{LAYERS}.self_attn.attn of the draft is not run" in why_refused(drafted)


@EAGLE
def test_a_draft_that_is_not_at_hand_is_refused(
    drafted: tuple[Loaded, str], monkeypatch: Patch
) -> None:
    """Of Model Runner V2: its layers would be taken for the model's."""
    model, _ = drafted
    drafting = SimpleNamespace(method="eagle")
    monkeypatch.setattr(model.vllm_config, "speculative_config", drafting)
    why = refused(lambda: checks.prove(model.model, model.vllm_config, model.kv_cache_config))
    assert why.endswith(
        "is not where vLLM's Model Runner V1 has it; set VLLM_USE_V2_MODEL_RUNNER=0"
    )


def test_what_no_proof_covers_is_refused_of_a_draft(
    drafted: tuple[Loaded, str], monkeypatch: Patch
) -> None:
    model, _ = drafted
    name, layer = next(it for it in model.attention.items() if it[0].startswith("draft."))
    monkeypatch.setattr(layer, "attn_type", "encoder_only")
    assert f"{name} is encoder_only attention" in why_refused(drafted)


def test_a_draft_that_attends_otherwise_is_found(
    drafted: tuple[Loaded, str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(of_drafts, "kind_of", lambda *_: AttentionKind(window=40))
    assert "does not attend to the last 40 tokens" in why_refused(drafted)


def test_kv_that_nobody_has_written_is_no_proof() -> None:
    """It equals itself, and is none of anything's norm."""
    layer = SimpleNamespace(kv_cache_dtype="auto", kv_cache=torch.zeros(2, 4))
    part = TiledStrides((1, 1, 2), 0, 2, 1, 2, 2, 2, 2, 1)
    scratch: Any = SimpleNamespace(
        stack=SimpleNamespace(attention=[layer]),
        layouts=[PageLayout(part, part)],
        tables=[0],
        own_in=lambda table: np.array([0]),
        copy_in=lambda table: np.array([1]),
        count=1,
    )
    assert passes.deviation(scratch) == math.inf


@HEADS
def test_states_are_combined_as_the_draft_does(drafted: tuple[Loaded, str]) -> None:
    model, method = drafted
    of_target = {n: a for n, a in model.attention.items() if not n.startswith("draft.")}
    stack = DecoderStack(model.model, of_target)
    assert stack.auxiliary_layers == (AUXILIARY if method == "eagle3" else ())
    draft = Draft(drafter_of(model, method), model.attention, stack)
    states = torch.ones(3, 4)
    assert torch.equal(draft.combined(states), states * (2 if method == "eagle3" else 1))


class Target:
    """Of four layers, which returns what enters some of them."""

    def __init__(self, auxiliary: tuple[int, ...]) -> None:
        self.auxiliary_layers = auxiliary

    def __len__(self) -> int:
        return 4


def draft_for(target: Any, method: str, uses_auxiliary: bool) -> Draft:
    drafter = SimpleNamespace(
        model=nn.Identity(),
        method=method,
        _draft_attn_layer_names=set(),
        pass_hidden_states_to_model=True,
        eagle3_use_aux_hidden_state=uses_auxiliary,
        draft_model_config=SimpleNamespace(max_model_len=9),
    )
    return Draft(drafter, {}, target)


@pytest.mark.parametrize(
    ("method", "uses_auxiliary", "layers"),
    [("eagle3", True, (0, 3)), ("eagle3", False, ()), ("eagle", True, ()), ("mtp", False, ())],
)
def test_only_eagle_3_is_given_states_of_other_layers_and_only_if_it_takes_them(
    method: str, uses_auxiliary: bool, layers: tuple[int, ...]
) -> None:
    assert draft_for(Target((0, 3)), method, uses_auxiliary).auxiliary_layers == layers


@pytest.mark.parametrize("layer", [-1, 4])
def test_states_that_enter_no_layer_are_refused_of_those_who_take_them(layer: int) -> None:
    target = Target((0, layer))
    with pytest.raises(UnsupportedModelError, match=rf"last of 4 layers \(\(0, {layer}\)\)"):
        draft_for(target, "eagle3", True)
    assert draft_for(target, "eagle3", False).auxiliary_layers == ()
    assert draft_for(target, "eagle", True).auxiliary_layers == ()


def test_a_draft_without_states_is_called_with_ids_and_positions_only() -> None:
    """Of others each call has a copy of the states: drafts change theirs in place."""
    calls: list[dict[str, Any]] = []

    def noting(**given: Any) -> None:
        calls.append({name: each.clone() for name, each in given.items()})
        if "hidden_states" in given:
            given["hidden_states"].zero_()

    ids, positions, states = torch.tensor([7, 8]), torch.tensor([0, 5]), torch.ones(2, 3)
    draft: Any = draft_for(Target(()), "eagle", False)
    draft.model, draft.given, draft.first = noting, states, 1
    draft.forward(ids, positions)
    draft.takes_states = False
    draft.forward(ids, positions)
    with_states, without = calls
    assert torch.equal(with_states.pop("hidden_states"), torch.ones(2, 3))
    assert torch.equal(states, torch.ones(2, 3))
    for call in (with_states, without):
        assert {name: each.tolist() for name, each in call.items()} == {
            "input_ids": [7, 8],
            "positions": [1, 6],
        }


@EAGLE
def test_layers_have_their_own_forward_again(drafted: tuple[Loaded, str]) -> None:
    proven(drafted)
    for layer in drafted[0].model.model.layers:
        assert "forward" not in layer.__dict__


# Which of the tokens, in which order.

SIZE = 4


class Noting:
    """Instead of a draft: what it is given."""

    takes_states = True
    auxiliary_layers: tuple[int, ...] = ()
    max_positions = 11
    attention = (None, None)
    model = nn.Identity()

    def __init__(self) -> None:
        self.given: list[tuple[int, int, float]] = []
        self.chunks: list[int] = []

    def combined(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def compute(self, ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        self.chunks.append(len(ids))
        self.given += zip(ids.tolist(), positions.tolist(), states[:, 0].tolist(), strict=True)


def plan(start: int, stop: int, **changes: Any) -> ReusePlan:
    """Of tokens named 100 + position; all computed."""
    count = stop - start
    return ReusePlan(
        "r",
        start,
        stop,
        np.arange(100 + start, 100 + stop, dtype=np.int32),
        Pieces.from_table(np.empty((0, 5), np.int64)),
        Recipe.without_choice(np.ones(count, bool)),
        [],
        0,
        np.arange(8, dtype=np.int32),
        **changes,
    )


def noted(plans: list[ReusePlan], active: list[int], **of_batch: Any) -> tuple[Noting, list[int]]:
    """What the draft is given where these flat indices are active: states are their numbers."""
    draft: Any = Noting()
    attention: Any = SimpleNamespace(forward_context=lambda *_: nullcontext())
    batch = Batch(plans, SIZE, torch.device("cpu"), **of_batch)
    state = LayerState(torch.tensor(active, dtype=torch.float32)[:, None], None)
    runner = DraftRunner(draft, attention, 64)
    work = list(runner.run(batch, torch.tensor(active, dtype=torch.int64), state))
    return draft, work


def test_what_enters_layers_is_kept_by_token() -> None:
    batch = Batch([plan(2, 6), plan(4, 7)], SIZE, torch.device("cpu"))
    batch.keep_auxiliary(1, batch.tokens.take(slice(3, 6)), torch.tensor([[3.0], [4.0], [5.0]]))
    batch.keep_auxiliary(1, batch.tokens.take(slice(5, 7)), torch.tensor([[6.0], [7.0]]))
    assert batch.auxiliary[1].flatten().tolist() == [0, 0, 0, 3, 4, 6, 7]


def test_heads_are_given_the_next_token_and_this_ones_state_in_order() -> None:
    draft, _ = noted([plan(2, 6, token_at_stop=77), plan(0, 3, token_at_stop=78)], [5, 0, 3, 6, 2])
    assert draft.given == [
        (103, 2, 0.0),
        (105, 4, 2.0),
        (77, 5, 3.0),
        (102, 1, 5.0),
        (78, 2, 6.0),
    ]


def test_a_token_whose_next_is_not_known_is_left_out() -> None:
    draft, _ = noted([plan(2, 5), plan(0, 2, token_at_stop=78)], [0, 1, 2, 3, 4])
    assert [at for _, at, _ in draft.given] == [2, 3, 0, 1]


def test_the_token_that_vllm_computes_is_its_own() -> None:
    draft, _ = noted([plan(2, 5, suffix=[77], token_at_stop=77)], [0, 1, 2, 3])
    assert draft.given == [(103, 2, 0.0), (104, 3, 1.0), (77, 4, 2.0)]


def test_positions_behind_the_drafts_last_are_left_out() -> None:
    draft, _ = noted([plan(9, 14, token_at_stop=7)], [0, 1, 2, 3, 4])
    assert [at for _, at, _ in draft.given] == [9, 10]


def test_spread_plans_draft_in_small_chunks() -> None:
    draft, work = noted([plan(0, 5, token_at_stop=7)], [0, 1, 2, 3, 4], chunk_work=4)
    assert draft.chunks == [2, 2, 1]
    assert work == [4, 4, 2], "tokens at two layers"


def test_nothing_is_drafted_of_no_tokens() -> None:
    draft, work = noted([plan(0, 5, token_at_stop=7)], [])
    assert (draft.given, work) == ([], [])


def test_a_pass_hands_over_what_it_has_computed(
    drafted: tuple[Loaded, str], monkeypatch: Patch
) -> None:
    runtime = proven(drafted)
    seen: list[list[int]] = []
    run = DraftRunner.run

    def noting(self: DraftRunner, batch: Batch, active: torch.Tensor, state: Any) -> Any:
        seen.append(sorted(active.tolist()))
        return run(self, batch, active, state)

    monkeypatch.setattr(DraftRunner, "run", noting)
    blocks = np.arange(9, 12, dtype=np.int32)
    always = np.arange(40) % 3 == 0
    one = plan(0, 40, token_at_stop=3)
    one.block_ids, one.token_ids = blocks, np.arange(40, dtype=np.int32)
    one.recipe = Recipe.without_choice(always)
    runtime.prefill.run([one])
    assert seen == [np.flatnonzero(always).tolist()]
