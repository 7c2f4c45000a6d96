# SPDX-License-Identifier: Apache-2.0
"""Rounds of options: what is tried, and from where each round starts."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from segreuse_extras.similar.options import SimilarityOptions
from segreuse_tools.calibrate import coordinate_search
from segreuse_tools.calibrate.search import Options, Setting, Trial
from vllm_segreuse.config import SegReuseConfig

LAYERS = (6, 12, 18)
Price = Callable[[Any], float]


def fit(
    price: Price, layers: Sequence[int] = LAYERS, may_enter: bool = False, drift: float | None = 0.1
) -> tuple[list[Options], list[int]]:
    """What is tried where the cheapest is the best, and how many in each round."""
    rounds = []

    def tried(options: Sequence[Options]) -> list[Setting]:
        rounds.append(len(options))
        return [
            Setting(
                it,
                [
                    Trial(0.0, 1.0, price(it.get("similarity", {})), drift and drift * n)
                    for n in range(20)
                ],
            )
            for it in options
        ]

    def best(settings: Sequence[Setting]) -> Setting:
        return min(settings, key=lambda it: it.trials[0].work)

    found = coordinate_search.fit(tried, best, layers, may_enter)
    return [it.options for it in found], rounds


def halo_is_best(similarity: Any) -> float:
    work = abs(similarity.get("threshold", 0) - 0.65)
    work += abs(similarity.get("halo_tokens", 0) - 8)
    return work + 10 * (similarity.get("w_exact") is not None)


def test_each_round_starts_from_the_best_so_far() -> None:
    tried, rounds = fit(halo_is_best)
    assert rounds == [4, 3, 3, 2, 3, 3]
    assert tried[0] == {}
    assert [it["similarity"] for it in tried[1:4]] == [{"threshold": t} for t in (0.5, 0.65, 0.8)]
    halos = [{"threshold": 0.65, "halo_tokens": n} for n in (4, 8, 16)]
    assert [it["similarity"] for it in tried[4:7]] == halos
    best = {"threshold": 0.65, "halo_tokens": 8}
    # Of ten drifts up to 0.9, those of the half that chooses.
    bounds = [best | {"max_boundary_drift": it} for it in (0.8, 0.6, 0.4)]
    assert [it["similarity"] for it in tried[7:10]] == bounds
    contexts = [best | {"min_context_tokens": n} for n in (8, 32)]
    assert [it["similarity"] for it in tried[10:12]] == contexts
    cuts = [best | {"w_exact": {str(layer): 0}} for layer in LAYERS]
    assert [it["similarity"] for it in tried[12:15]] == cuts
    assert [it.get("policy") for it in tried] == [None] * 12 + ["shift"] * 6


def test_tables_are_of_the_best_cut_and_ask_for_more_higher_up() -> None:
    def at_12(similarity: Any) -> float:
        return 1.0 - 0.5 * ("12" in similarity.get("w_exact", {}))

    tried, _ = fit(at_12)
    tables = [it["similarity"]["w_exact"] for it in tried[-3:]]
    assert tables == [{"12": 8}, {"12": 0, "all": 32}, {"12": 8, "all": "full_prefix"}]


def test_without_a_halo_nothing_can_be_rejected() -> None:
    tried, rounds = fit(halo_is_best, drift=None)
    assert rounds == [4, 3, 0, 2, 3, 3]
    assert not any("max_boundary_drift" in it.get("similarity", {}) for it in tried)


def test_a_policy_that_lets_tokens_enter_is_kept() -> None:
    tried, _ = fit(halo_is_best, may_enter=True)
    assert all("policy" not in it for it in tried)


def test_nothing_is_tried_twice() -> None:
    def first(similarity: Any) -> float:
        return 1.0

    tried, rounds = fit(first)
    assert len({repr(it) for it in tried}) == len(tried)
    assert rounds[2] == 3
    # Halos that are all as far off give one bound, not three.
    tried, rounds = fit(halo_is_best, drift=0.0)
    assert len({repr(it) for it in tried}) == len(tried)
    assert rounds[2] == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 24, 80])
def test_cuts_are_layers_between_the_first_and_the_last(count: int) -> None:
    cuts = coordinate_search.cuts(count)
    assert all(0 < it < count for it in cuts)
    assert all(a < b for a, b in pairwise(cuts))
    assert len(cuts) == min(3, count - 1)


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_the_engine_has_room_for_all_that_is_tried(layers: tuple[int, ...]) -> None:
    server = SimilarityOptions.model_validate(coordinate_search.reserved(layers))
    assert server.cuts == layers
    tried, _ = fit(halo_is_best, layers)
    for options in tried:
        written = SegReuseConfig.model_validate(options)
        mine = written.similarity
        if mine is not None:
            assert set(mine.cuts) <= set(server.cuts)
            assert mine.threshold >= server.threshold
            assert mine.halo_tokens <= server.halo_tokens
