# SPDX-License-Identifier: Apache-2.0
"""Recipes can be carried out, and options mean what they say at their limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.options import request
from vllm_segreuse.plan import Deviation, Recipe, Segments
from vllm_segreuse.policies import POLICIES, Situation

TAIL = 64

runs = st.lists(st.tuples(st.booleans(), st.integers(1, 90)), min_size=1, max_size=8)
situations = st.builds(
    lambda runs, **options: situation([r for reused, n in runs for r in [reused] * n], **options),
    runs,
    block_size=st.sampled_from([1, 16, 32]),
    recompute_ratio=st.sampled_from([None, 0.0, 0.1, 0.5, 0.99, 1.0]),
    dense_layers=st.sampled_from([0, 1, 3, 19, 20, 4096, 0.15, 0.99]),
    overflow_tokens=st.sampled_from([None, 0, 1, 7, 1000]),
)


def situation(reused: list[bool], **options) -> Situation:
    defaults = {
        "block_size": 16,
        "num_layers": 20,
        "recompute_ratio": 0.1,
        "dense_layers": 0,
        "overflow_tokens": None,
    }
    mask = np.array(reused, np.bool_)
    starts = np.flatnonzero(mask & ~np.append(False, mask[:-1])).astype(np.int32)
    behind = np.arange(starts.size, dtype=np.int32) * 50
    segments = Segments.elsewhere(starts, behind)
    return Situation(reused=mask, **{"segments": segments} | defaults | options)


def sparsex(given: Situation) -> Recipe:
    return POLICIES["sparsex"](given)


def test_the_policies_are_those_that_options_may_name():
    assert request.POLICIES is POLICIES
    assert [*POLICIES] == [
        "cacheblend",
        "epic",
        "exact",
        "focus",
        "peaks",
        "prophet",
        "shift",
        "sparsex",
    ]


@given(situations)
def test_every_recipe_can_be_carried_out(given):
    before = given.reused.copy()
    for policy in POLICIES.values():
        recipe = policy(given)
        assert recipe.always[~given.reused].all()
        assert 0 <= recipe.top_k <= (~recipe.always).sum()
        assert 0 <= recipe.program.dense_layers <= given.num_layers
        # Of the last layer only keys and values are computed: a choice must be made before it.
        assert recipe.program.dense_layers < given.num_layers or not recipe.top_k
        assert recipe.always.shape == recipe.probes.shape == given.reused.shape
        assert recipe.always.dtype == recipe.probes.dtype == np.bool_
        # Attention needs a query, and it must be there when the boundary layer has been computed.
        assert recipe.probes.any() or isinstance(recipe.program, Deviation) or not recipe.top_k
        assert recipe.always[recipe.probes].all()
    assert (given.reused == before).all()


@pytest.mark.parametrize("by", [0, 1, 4, 10])
def test_overflow_lies_on_both_sides_and_stops_at_the_ends(by):
    reused = [True] * 200
    reused[50:53] = [False] * 3
    reused[195] = False
    recipe = sparsex(situation(reused, overflow_tokens=by, recompute_ratio=0.0))
    expected = [*range(50 - by, 53 + by), *range(195 - by, min(196 + by, 200))]
    assert np.flatnonzero(recipe.always).tolist() == expected
    assert np.flatnonzero(recipe.probes).tolist() == [50, 51, 52, 195]


@pytest.mark.parametrize(("new_at", "extra"), [(199, 0), (136, 0), (135, TAIL)])
def test_the_tail_counts_only_if_it_is_all_reused(new_at, extra):
    reused = [i != new_at for i in range(200)]
    recipe = sparsex(situation(reused, overflow_tokens=0))
    assert recipe.always.sum() == recipe.probes.sum() == 1 + extra


def test_a_prompt_that_is_all_reused_and_shorter_than_the_tail_is_computed():
    recipe = sparsex(situation([True] * 40))
    assert recipe.always.all()
    assert recipe.top_k == 0


@pytest.mark.parametrize(
    ("dense_layers", "num_layers", "expected"),
    [
        (0, 20, 0),
        (1, 20, 1),
        (20, 20, 20),
        (21, 20, 20),
        (0.15, 20, 3),
        (0.15, 28, 4),
        (0.15, 4, 1),
        (0.01, 20, 1),
        (0.99, 4, 4),
        (0.5, 1, 1),
    ],
)
def test_dense_layers_are_a_number_or_a_share(dense_layers, num_layers, expected):
    given = situation([True] * 100, dense_layers=dense_layers, num_layers=num_layers)
    assert sparsex(given).program.dense_layers == expected
