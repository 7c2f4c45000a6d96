# SPDX-License-Identifier: Apache-2.0
"""Layer programs choose by what they say they choose by, on layers whose numbers are known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_segreuse.cache.plan import Recipe, ReusePlan, Score
from vllm_segreuse.kernels.pages import PageLayout, TiledStrides, flat_pages
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.layers import LayerState
from vllm_segreuse.prefill.programs import Waves, asked, deviating, finish, program_of

SIZE, HEADS, CHANNELS, LAYERS = 16, 2, 8, 3
TOKENS = 48


def half(number: int) -> TiledStrides:
    """Keys (0) or values (1) of a page `[2, HEADS, SIZE, CHANNELS]`."""
    head = SIZE * CHANNELS
    offset = number * HEADS * head
    return TiledStrides(
        (HEADS, SIZE, CHANNELS), offset, head, SIZE, head, CHANNELS, CHANNELS, CHANNELS, 1
    )


def plan(
    new: list[int], top_k: int, score: Score, least_share: float = 0.0, first: int = 0
) -> ReusePlan:
    """A plan of `TOKENS` tokens of which all but `new` are reused; `first`: its first block."""
    always = np.zeros(TOKENS, bool)
    always[new] = True
    dense_layers = 1 if score is Score.DEVIATION else 0
    recipe = Recipe(always, dense_layers, top_k, always.copy(), score, least_share)
    blocks = np.arange(first, first + TOKENS // SIZE, dtype=np.int32)
    pieces = np.empty((0, 5), np.int32)
    return ReusePlan(
        f"from {first}", 0, TOKENS, np.zeros(TOKENS, np.int32), pieces, recipe, [], 0, blocks
    )


class Known:
    """`Layers` whose attention and whose keys and values are given.

    Attributes:
        attention: flat index of a probe -> flat indices of the tokens it attends to, best first.
        computed: keys and values of the boundary layer.
        ran: (first layer, last layer, tokens) of every run.
    """

    def __init__(self) -> None:
        layout = PageLayout(half(0), half(1))
        cache = torch.randn(2 * TOKENS // SIZE, 2, HEADS, SIZE, CHANNELS)
        self.layouts = [layout] * LAYERS
        self.attention: dict[int, list[int]] = {}
        layer = SimpleNamespace(kv_cache=cache)
        self.stack = SimpleNamespace(attention=[layer] * LAYERS)
        pages = flat_pages(cache)
        self.computed = (layout.keys.tokens(pages), layout.values.tokens(pages))
        self.ran: list[tuple[int, int, list[int]]] = []

    def __len__(self) -> int:
        return LAYERS

    def layers(self, first: int, last: int, tokens, state, batch) -> Waves[LayerState]:
        self.ran.append((first, last, tokens.slots.tolist()))
        yield len(tokens) * (last - first)
        return LayerState(torch.zeros(len(tokens), 4), None)

    def all_layers(self, tokens, batch) -> Waves[LayerState]:
        return (yield from self.layers(0, LAYERS, tokens, None, batch))

    def queries(self, tokens, batch) -> Waves[list[torch.Tensor]]:
        yield from self.layers(0, LAYERS - 1, tokens, None, batch)
        return [torch.zeros(len(tokens), HEADS, CHANNELS)] * (LAYERS - 1)

    def keys_and_values(self, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return self.computed

    def attention_paid(self, batch, layer, probed, counts, queries, highest) -> torch.Tensor:
        assert sum(counts) == len(probed)
        mass = torch.zeros(len(batch.tokens))
        for probe in probed.tolist():
            for rank, target in enumerate(self.attention.get(probe, [])):
                share = 1 / (1 + rank)
                mass[target] = max(float(mass[target]), share) if highest else mass[target] + share
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
    active, _ = finish(deviating(layers, batch_of(plan([46, 47], 2, Score.DEVIATION))))
    assert active.tolist() == [7, 30, 46, 47]
    assert layers.ran == [(0, 1, list(range(TOKENS))), (1, LAYERS, [7, 30, 46, 47])]


def test_what_the_question_attends_to_at_any_layer_is_computed_with_it() -> None:
    layers = Known()
    layers.attention = {47: [20, 3], 20: [9], 9: [5]}
    active, _ = finish(asked(layers, batch_of(plan([47], 2, Score.ALL_LAYERS))))
    assert active.tolist() == [3, 20, 47]
    assert layers.ran == [(0, LAYERS - 1, [47]), (0, LAYERS, [3, 20, 47])]


@pytest.mark.parametrize(("least_share", "chosen"), [(0.0, 20), (0.04, 20), (0.1, 10), (0.9, 1)])
def test_as_many_are_chosen_as_get_a_share_of_attention(least_share: float, chosen: int) -> None:
    layers = Known()
    layers.attention = {47: list(range(30))}  # the second gets 1/2, the tenth 1/10, ...
    active, _ = finish(asked(layers, batch_of(plan([47], 20, Score.PEAK, least_share))))
    assert active.tolist() == [*range(chosen), 47]


def test_a_peak_counts_for_more_than_many_small_shares() -> None:
    layers = Known()
    # Everybody pays token 5 a third; one query pays token 20 all it has.
    layers.attention = {probe: [30 + probe % 8, 40, 5] for probe in range(42, 47)} | {47: [20]}
    new = list(range(42, 48))
    active, _ = finish(asked(layers, batch_of(plan(new, 7, Score.PEAK))))
    assert 20 in active
    assert 5 not in active
    active, _ = finish(asked(layers, batch_of(plan(new, 2, Score.ALL_LAYERS))))
    assert 5 in active
    assert 20 not in active


def test_plans_side_by_side_choose_each_for_itself() -> None:
    layers = Known()
    seen = range(TOKENS, TOKENS + 30)
    layers.attention = {47: list(range(20)), TOKENS + 46: [*seen], TOKENS + 45: [*seen[:9]]}
    batch = batch_of(plan([47], 12, Score.PEAK, 0.1), plan([45, 46], 20, Score.PEAK, 0.1, first=3))
    active, _ = finish(asked(layers, batch))
    assert batch.num_active(active).tolist() == [11, 12]
    assert active.tolist() == [*range(10), 47, *seen[:10], TOKENS + 45, TOKENS + 46]


def test_a_recipe_without_a_choice_needs_no_score() -> None:
    for score in Score:
        assert program_of(plan([47], 0, score).recipe).__name__ == "fixed"
        assert program_of(plan([47], 1, score).recipe).__name__ != "fixed"
