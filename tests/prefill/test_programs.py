# SPDX-License-Identifier: Apache-2.0
"""Layer programs choose by what they say they choose by, on layers whose numbers are known."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.tiny import make_plan
from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.pages import PageLayout, TiledStrides, flat_pages
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.plan import (
    Boundary,
    Deviation,
    Fixed,
    Gather,
    ModelLayers,
    Pieces,
    Probed,
    Program,
    Recipe,
    ReusePlan,
    Staged,
    Stock,
    fates_of,
)
from vllm_segreuse.prefill import programs
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks, finish
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.tokens import Index

SIZE, HEADS, CHANNELS, LAYERS = 16, 2, 8, 3
TOKENS = 48


def half(number: int) -> TiledStrides:
    """Keys (0) or values (1) of a page `[2, HEADS, SIZE, CHANNELS]`."""
    head = SIZE * CHANNELS
    offset = number * HEADS * head
    return TiledStrides(
        (HEADS, SIZE, CHANNELS), offset, head, SIZE, head, CHANNELS, CHANNELS, CHANNELS, 1
    )


SUM, MAX = Probed(Gather.SUM), Probed(Gather.MAX)
LATE = Probed(Gather.SUM_AND_LAST, first_layer=1)


def plan(
    program: Program,
    new: list[int],
    top_k: int,
    first: int = 0,
    probes: list[int] | None = None,
) -> ReusePlan:
    """A plan of `TOKENS` tokens of which all but `new` are reused; `new` are the probes, unless
    they are given; `first`: its first block."""
    always, probing = np.zeros(TOKENS, bool), np.zeros(TOKENS, bool)
    always[new] = True
    probing[new if probes is None else probes] = True
    recipe = Recipe.of(program, fates_of(always, probing), top_k)
    blocks = np.arange(first, first + TOKENS // SIZE, dtype=np.int32)
    pieces = Pieces.from_table([])
    return ReusePlan(
        f"from {first}", 0, TOKENS, np.zeros(TOKENS, np.int32), pieces, recipe, [], 0, blocks
    )


class Attention(SimpleNamespace):
    """In the place of a layer of vLLM's."""

    def set_scales(self, key: float, value: float, query: float) -> None:
        """Of its numbers in fp8."""
        self._k_scale_float, self._v_scale_float, self._q_scale_float = key, value, query


class Known:
    """`LayerRunner` whose attention and whose keys and values are given.

    Attributes:
        attention: flat index of a probe -> flat indices of the tokens it attends to, best first.
        computed: keys and values of the boundary layer.
        ran: (first layer, last layer, tokens) of every run.
        scored: (layer, probes) of every time that attention was asked for.
    """

    def __init__(self) -> None:
        layout = PageLayout(half(0), half(1))
        cache = torch.randn(2 * TOKENS // SIZE, 2, HEADS, SIZE, CHANNELS)
        self.layouts = [layout] * LAYERS
        self.model = ModelLayers.of_full_attention(LAYERS)
        self.attention: dict[int, list[int]] = {}
        self.scored: list[tuple[int, list[int]]] = []
        attention = [
            Attention(kv_cache=cache, kv_cache_dtype="auto", num_heads=HEADS, head_size=CHANNELS)
            for _ in range(LAYERS)
        ]
        self.stack = SimpleNamespace(attention=attention, behind=[])
        kernels: Any = None
        self.known = [LayerKv(layer, layout, None, kernels) for layer in attention]
        pages = flat_pages(cache)
        self.computed = (layout.keys.tokens(pages), layout.values.tokens(pages))
        self.ran: list[tuple[int, int, list[int]]] = []

    def __len__(self) -> int:
        return LAYERS

    def own(self, layers) -> list[int]:
        return list(layers)

    def run(self, first: int, last: int, tokens, state, batch, queries=None) -> Chunks[LayerState]:
        self.ran.append((first, last, tokens.slots.tolist()))
        if queries is not None:  # a query tells whose it is
            rows = tokens.slots.float()[:, None, None].expand(-1, HEADS, CHANNELS)
            for layer in self.stack.attention[first:last]:
                with queries.of(layer, rows):
                    pass
        yield len(tokens) * (last - first)
        return LayerState(torch.zeros(len(tokens), 4), None)

    def all_layers(self, tokens, batch, watching=None) -> Chunks[LayerState]:
        return (yield from self.run(0, LAYERS, tokens, None, batch))

    def note_finite(self, state: LayerState, tokens, batch) -> None:
        assert len(state.hidden_states) == len(tokens)

    def keep(self, state: LayerState, index: torch.Tensor) -> LayerState:
        return state.take(index)

    def up_to_choice(
        self, wanted, computed, last, queries, batch
    ) -> Chunks[tuple[Index, LayerState]]:
        yield from self.run(0, last + 1, batch.tokens.take(computed), None, batch, queries)
        others = computed.without(wanted)
        return others, LayerState(torch.zeros(len(others), 4), None)

    def keys_and_values(self, *_: object) -> Iterator[tuple[slice, Any]]:
        for part in (slice(0, 20), slice(20, len(self.computed[0]))):  # two chunks
            yield part, [each[part] for each in self.computed]

    def attention_scores(self, batch, layer, part, queries, gather=Gather.SUM) -> torch.Tensor:
        probed = batch.probes.device[part]
        assert len(probed) == len(queries)
        self.scored.append((layer, probed.tolist()))
        every = self._paid(batch, probed, gather)
        if gather is not Gather.SUM_AND_LAST:
            return every
        return torch.stack([every, self._paid(batch, probed[-4:], gather)])  # of the only plan

    def _paid(self, batch, probed, gather) -> torch.Tensor:
        mass = torch.zeros(len(batch.tokens))
        for probe in probed.tolist():
            for rank, target in enumerate(self.attention.get(probe, [])):
                share = 1 / (1 + rank)
                so_far = float(mass[target])
                mass[target] = max(so_far, share) if gather is Gather.MAX else so_far + share
        return mass


def batch_of(*plans: ReusePlan) -> Batch:
    return Batch(list(plans), SIZE, torch.device("cpu"))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_segreuse.prefill import selection

    monkeypatch.setattr(selection, "get_tp_group", lambda: SimpleNamespace(world_size=1))


def test_deviation_picks_the_tokens_whose_keys_or_values_moved_most() -> None:
    layers = Known()
    keys, values = (part.clone() for part in layers.computed)
    keys[7] += 1.0
    values[30] -= 2.0
    keys[40] += 0.1
    values[47] += 9.0  # new: it is computed anyway, and must not take a place
    layers.computed = (keys[:TOKENS], values[:TOKENS])
    active, _ = finish(programs.run(layers, batch_of(plan(Deviation(1), [46, 47], 2))))
    assert active.tolist() == [7, 30, 46, 47]
    assert layers.ran == [(0, 1, list(range(TOKENS))), (1, LAYERS, [7, 30, 46, 47])]


def test_what_the_question_attends_to_at_any_layer_is_computed_with_it() -> None:
    layers = Known()
    layers.attention = {47: [20, 3], 20: [9], 9: [5]}
    active, _ = finish(programs.run(layers, batch_of(plan(SUM, [47], 2))))
    assert active.tolist() == [3, 20, 47]
    assert layers.ran == [(0, LAYERS - 1, [47]), (0, LAYERS, [3, 20, 47])]


@pytest.mark.parametrize("dense_layers", [0, 1, 2])
def test_sparsex_computes_what_the_probes_attend_to_most_at_the_boundary(
    dense_layers: int,
) -> None:
    """Algorithm 1: the most, not the least; what is always computed takes nobody's place, and who
    does not ask has no say."""
    layers = Known()
    layers.attention = {47: [46, 20, 3, 9], 40: [20, 9], 10: [1, 2, 4]}
    given = plan(Boundary(dense_layers), [10, 40, 46, 47], 2, probes=[40, 47])
    active, _ = finish(programs.run(layers, batch_of(given)))
    assert active.tolist() == [9, 10, 20, 40, 46, 47]  # 20: 3/2, 9: 3/4, 3: 1/3
    boundary = max(dense_layers, 1)
    assert layers.scored == [(boundary - 1, [40, 47])]
    first = [*range(TOKENS)] if dense_layers else [10, 40, 46, 47]
    behind = dense_layers  # without dense layers, from the beginning
    assert layers.ran == [(0, boundary, first), (behind, LAYERS, active.tolist())]


def test_sparsex_asks_with_the_queries_of_the_probes() -> None:
    layers, given = Known(), []

    def paid(batch, layer, part, queries, gather):
        assert gather is Gather.SUM
        given.append((part, queries[:, 0, 0].tolist()))
        return torch.zeros(len(batch.tokens))

    layers.attention_scores = paid  # type: ignore[method-assign]
    for dense_layers in (0, 1):
        plans = (
            plan(Boundary(dense_layers), [3, 47], 1, first, probes)
            for first, probes in ((3, [47]), (0, [3, 47]))
        )
        finish(programs.run(layers, batch_of(*plans)))
    slots = [3 * SIZE + 47, 3, 47]  # the first plan lies in blocks behind the second's
    assert given == [(slice(0, 3), slots)] * 2


def test_every_layer_but_the_last_is_asked() -> None:
    for program in (SUM, MAX):
        layers = Known()
        finish(programs.run(layers, batch_of(plan(program, [46, 47], 1, probes=[47]))))
        assert layers.scored == [(layer, [47]) for layer in range(LAYERS - 1)]


def test_only_some_layers_count_and_the_last_queries_count_twice() -> None:
    layers = Known()
    # Six probes. All of the first two, one of them, and none of the last four attend to 20; the
    # last four attend to 9 as well, and 5 gets as much in all as 9 does.
    layers.attention = {41: [20, 5], 42: [20, 5], 43: [5], 44: [9], 45: [9], 46: [5, 9], 47: [9]}
    probes = [*range(42, 48)]
    active, _ = finish(programs.run(layers, batch_of(plan(LATE, probes, 1))))
    assert active.tolist() == [9, *probes], "by the sum alone it would be 20 or 5"
    assert layers.scored == [(1, probes)], "once, and not layer 0"


def test_of_small_models_the_last_layer_probed_counts() -> None:
    layers = Known()
    late = Probed(Gather.SUM, first_layer=LAYERS)
    finish(programs.run(layers, batch_of(plan(late, [47], 1))))
    assert layers.scored == [(LAYERS - 2, [47])]


def test_sums_are_over_layers_and_peaks_are_not() -> None:
    layers = Known()
    by_layer = [{47: [5, 8]}, {47: [6, 8]}]  # 8 gets a half twice, and 5 and 6 get 1 once

    def paid(batch, layer, part, queries, gather):
        layers.attention = by_layer[layer]
        return Known.attention_scores(layers, batch, layer, part, queries, gather)

    layers.attention_scores = paid  # type: ignore[method-assign]
    for program, top_k, chosen in (
        (SUM, 3, [5, 6, 8]),
        (MAX, 2, [5, 6]),
        (MAX, 3, [5, 6, 8]),
    ):
        active, _ = finish(programs.run(layers, batch_of(plan(program, [47], top_k))))
        assert active.tolist() == [*chosen, 47]
    by_layer[1] = {47: [9, 8]}
    by_layer[0] = {47: [5, 8, 5, 5]}
    active, _ = finish(programs.run(layers, batch_of(plan(SUM, [47], 1))))
    assert active.tolist() == [5, 47]


@pytest.mark.parametrize(("threshold", "chosen"), [(0.0, 20), (0.04, 20), (0.1, 10), (0.9, 1)])
def test_as_many_are_chosen_as_get_a_share_of_attention(threshold: float, chosen: int) -> None:
    layers = Known()
    layers.attention = {47: list(range(30))}  # the second gets 1/2, the tenth 1/10, ...
    active, _ = finish(
        programs.run(layers, batch_of(plan(Probed(Gather.MAX, threshold), [47], 20)))
    )
    assert active.tolist() == [*range(chosen), 47]


def test_a_peak_counts_for_more_than_many_small_shares() -> None:
    layers = Known()
    # Everybody pays token 5 a third; one query pays token 20 all it has.
    layers.attention = {probe: [30 + probe % 8, 40, 5] for probe in range(42, 47)} | {47: [20]}
    new = list(range(42, 48))
    active, _ = finish(programs.run(layers, batch_of(plan(MAX, new, 7))))
    assert 20 in active
    assert 5 not in active
    active, _ = finish(programs.run(layers, batch_of(plan(SUM, new, 2))))
    assert 5 in active
    assert 20 not in active


def test_plans_side_by_side_choose_each_for_itself() -> None:
    layers = Known()
    seen = range(TOKENS, TOKENS + 30)
    layers.attention = {47: list(range(20)), TOKENS + 46: [*seen], TOKENS + 45: [*seen[:9]]}
    above = Probed(Gather.MAX, 0.1)
    batch = batch_of(plan(above, [47], 12), plan(above, [45, 46], 20, first=3))
    active, _ = finish(programs.run(layers, batch))
    assert batch.num_active(active).tolist() == [11, 12]
    assert active.tolist() == [*range(10), 47, *seen[:10], TOKENS + 45, TOKENS + 46]


@pytest.mark.parametrize("program", [Fixed, Staged, Stock, Boundary, Deviation, Probed])
def test_every_program_has_a_module_that_runs_it(program: type[Program]) -> None:
    assert programs.PROGRAMS[program].PROGRAM is program
    assert len(programs.PROGRAMS) == 6


def test_the_program_of_a_batch_runs_with_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []

    def run(program: Program, *_: Any) -> Chunks[str]:
        given.append(program)
        yield 3
        return "computed"

    monkeypatch.setattr(programs.PROGRAMS[Probed], "run", run)
    batch = batch_of(plan(Probed(Gather.MAX, 0.25), [47], 1))
    assert finish(programs.run(Known(), batch)) == "computed"  # type: ignore[arg-type]
    assert given == [Probed(Gather.MAX, 0.25)]


@pytest.mark.parametrize(
    ("program", "collectives"),
    [
        (MAX, ["all_gather", "all_reduce"]),  # the second is of the drift
        (SUM, ["all_reduce", "all_reduce"]),
        (LATE, ["all_reduce", "all_reduce"]),
        (Probed(Gather.MAX, 0.1), ["all_gather"]),
        (Boundary(), ["all_reduce"]),
    ],
    ids=str,
)
def test_ranks_gather_scores_as_the_program_does(
    program: Program, collectives: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def called(name: str, result: Any) -> Any:
        def call(scores: torch.Tensor, **_: Any) -> Any:
            assert scores.dtype == torch.float32, "vLLM's CPU ranks add no other"
            calls.append(name)
            return result(scores)

        return call

    ranks = SimpleNamespace(
        world_size=2,
        all_reduce=called("all_reduce", lambda scores: 2 * scores),
        all_gather=called("all_gather", lambda scores: torch.cat([scores, scores])),
        broadcast=lambda chosen, src: chosen,
    )
    monkeypatch.setattr("vllm_segreuse.prefill.selection.get_tp_group", lambda: ranks)
    finish(programs.run(Known(), batch_of(plan(program, [47], 1))))  # type: ignore[arg-type]
    assert calls == collectives


def test_every_program_is_proven() -> None:
    cases = programs.proof_cases(num_layers=7)
    assert {type(case.program) for case in cases} == set(programs.PROGRAMS)
    assert all(case.program.chooses == (case.top_k > 0) for case in cases)


@pytest.mark.parametrize("gather", Gather)
def test_attention_is_what_a_loop_over_queries_heads_and_keys_says(gather: Gather) -> None:
    """Random queries and keys in scattered pages; plans behind a prefix hit, two heads a key."""
    kv_heads, heads, channels, size, layer = 2, 6, 8, 4, 1
    head = size * channels
    shape = (kv_heads, size, channels)
    keys = TiledStrides(shape, 0, head, size, head, channels, channels, channels, 1)
    torch.manual_seed(1)
    caches = [torch.randn(40, 2, kv_heads, size, channels) for _ in range(2)]
    impl = SimpleNamespace(scale=0.7)
    attention = [SimpleNamespace(kv_cache=c, kv_cache_dtype="auto", impl=impl) for c in caches]
    kernels: Any = SimpleNamespace(token_scores=reference.token_scores)
    layers = LayerRunner(
        SimpleNamespace(attention=attention, behind=[]),  # type: ignore[arg-type]
        [LayerKv(of, PageLayout(keys, keys), None, kernels) for of in attention],  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
    )
    blocks = np.random.default_rng(0).permutation(40)
    plans = [
        make_plan("hit", 8, [2, 3, 5, 7, 9, 10], 11, blocks[:5]),
        make_plan("cold", 0, [0, 6], 9, blocks[5:8]),
        make_plan("next", 13, [], 6, blocks[8:14], [1, 2]),
    ]
    batch = Batch(plans, size, torch.device("cpu"))
    probed = batch.probes.device
    assert probed.tolist() == [2, 3, 5, 7, 9, 10, 11, 17, 26, 27]
    queries = torch.randn(len(probed), heads, channels)
    paid = layers.attention_scores(batch, layer, slice(0, 10), queries, gather)
    chunks = [
        layers.attention_scores(batch, layer, part, queries[part], gather)
        for part in (slice(0, 3), slice(3, 8), slice(8, 10))  # of one plan, of two, of the last
    ]
    together = torch.stack(chunks)
    torch.testing.assert_close(together.amax(0) if gather is Gather.MAX else together.sum(0), paid)

    expected, by_last = [], []
    rows = iter(queries.double())
    for plan in plans:
        last = plan.stop + len(plan.suffix)
        mass, late = (dict.fromkeys(range(plan.start, last), 0.0) for _ in range(2))
        asking = [plan.start + i for i in np.flatnonzero(plan.recipe.probes)]
        asking += range(plan.stop, last)
        for position in asking:
            query = next(rows)
            for h in range(heads):
                held = [
                    caches[layer][plan.block_ids[j // size], 0, h // 3, j % size].double()
                    for j in range(position + 1)
                ]
                weights = [math.exp(0.7 * float(query[h] @ key)) for key in held]
                for j, weight in enumerate(weights):
                    share = weight / sum(weights)
                    if j in mass:
                        mass[j] = max(mass[j], share) if gather is Gather.MAX else mass[j] + share
                        late[j] += share * (position in asking[-4:])
        expected += mass.values()
        by_last += late.values()
    both = torch.tensor([expected, by_last]).double()
    wanted = both if gather is Gather.SUM_AND_LAST else both[0]
    torch.testing.assert_close(paid, wanted.float())
    assert paid.dtype == torch.float32
