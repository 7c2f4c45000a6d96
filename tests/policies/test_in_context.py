# SPDX-License-Identifier: Apache-2.0
"""No policy computes reused text again whose context is the one that it was computed in."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.plan import Fixed, Segments
from vllm_segreuse.policies import POLICIES
from vllm_segreuse.policies.base import Situation

CHOOSING = ("cacheblend", "focus", "peaks", "prophet", "sparsex")
PARTS = st.lists(
    st.tuples(st.sampled_from(["new", "moved", "alone", "same"]), st.integers(1, 300)),
    min_size=1,
    max_size=6,
)


def situation(parts: list[tuple[str, int]], ratio: float | None = None) -> Situation:
    """Parts of a prompt: new text, and segments that were moved, read alone, or in place."""
    kinds = [kind for kind, length in parts for _ in range(length)]
    starts = np.cumsum([0, *(length for _, length in parts)])[:-1]
    segments = [(first, kind) for first, (kind, _) in zip(starts, parts, strict=True)]
    segments = [(first, kind) for first, kind in segments if kind != "new"]
    return Situation(
        reused=np.array([kind != "new" for kind in kinds]),
        segments=Segments(
            np.array([first for first, _ in segments], np.int32),
            np.array([0 if kind == "alone" else 500 for _, kind in segments], np.int32),
            np.array([kind == "same" for _, kind in segments], np.bool_),
            np.array([float(kind != "same") for _, kind in segments]),
        ),
        block_size=16,
        num_layers=8,
        recompute_ratio=ratio,
        dense_layers=0,
        overflow_tokens=0,
    )


def is_same(given: list[tuple[str, int]]) -> np.ndarray:
    return np.array([kind == "same" for kind, length in given for _ in range(length)])


@pytest.mark.parametrize("policy", [*CHOOSING, "epic", "shift"])
@given(parts=PARTS, ratio=st.sampled_from([None, 0.0, 0.3, 0.99]))
def test_it_is_never_chosen(policy: str, parts: list[tuple[str, int]], ratio: float | None) -> None:
    given = situation(parts, ratio)
    recipe = POLICIES[policy](given)
    spared = is_same(parts) & ~given.probes
    assert not (recipe.settled & spared).any()
    if recipe.top_k:
        assert not (recipe.candidates & is_same(parts)).any()
        assert recipe.top_k <= recipe.candidates.sum()


@pytest.mark.parametrize("policy", [*CHOOSING, "epic"])
@given(parts=PARTS)
def test_with_a_ratio_of_one_it_is_computed_with_all_the_rest(
    policy: str, parts: list[tuple[str, int]]
) -> None:
    recipe = POLICIES[policy](situation(parts, 1.0))
    assert (recipe.settled.sum() if not recipe.top_k else recipe.candidates.sum()) > 0
    assert int(recipe.always.sum()) + recipe.top_k >= len(recipe.always)


@pytest.mark.parametrize("policy", CHOOSING)
def test_budgets_count_the_rest_only(policy: str) -> None:
    rest = [("moved", 400), ("alone", 200), ("new", 30)]
    long, short = situation([("same", 3000), *rest]), situation([("new", 3000), *rest])
    assert POLICIES[policy](long).top_k == POLICIES[policy](short).top_k > 0


@pytest.mark.parametrize("policy", CHOOSING)
def test_a_prompt_that_only_goes_on_has_nothing_to_choose(policy: str) -> None:
    recipe = POLICIES[policy](situation([("same", 3000), ("new", 30)]))
    assert (recipe.top_k, recipe.always.sum()) == (0, 30)
    assert recipe.program == Fixed(recipe.program.dense_layers)


def edited(changed: list[float], length: int = 400) -> Situation:
    """Segments of one conversation, behind which so much has changed, and a question."""
    given = situation([("moved", length)] * len(changed) + [("new", 30)])
    return replace(given, segments=given.segments._replace(changed=np.array(changed)))


@given(
    changed=st.lists(st.floats(0.0001, 1), min_size=1, max_size=8),
    more=st.floats(1, 3),
    at=st.data(),
)
def test_the_less_of_a_context_has_changed_the_less_is_computed_again(
    changed: list[float], more: float, at: st.DataObject
) -> None:
    which = at.draw(st.integers(0, len(changed) - 1))
    other = [*changed]
    other[which] = min(1, more * changed[which])
    few, many = (POLICIES["focus"](edited(it)).top_k for it in (changed, other))
    assert few <= many <= POLICIES["focus"](edited([1.0] * len(changed))).top_k


def test_behind_an_edit_the_budget_grows_with_the_root_of_what_has_changed() -> None:
    budgets = [POLICIES["focus"](edited([it] * 10)).top_k for it in (1, 0.25, 0.0625, 0.01)]
    assert budgets == [280, 280, 140, 56]
    assert POLICIES["focus"](replace(edited([0.01]), recompute_ratio=0.5)).top_k == 200


def test_where_nearly_nothing_has_changed_all_is_moved() -> None:
    given = edited([0.0001] * 4)
    recipe = POLICIES["focus"](given)
    assert (recipe.top_k, recipe.program) == (0, Fixed())
    assert recipe.suffix_tokens(4 * 400) == 30
