# SPDX-License-Identifier: Apache-2.0
"""Every policy picks what its paper says, token by token: examples by hand, and any prompt against
`definitions.py`."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies import definitions
from tests.policies.definitions import Definition
from vllm_segreuse.plan import (
    Boundary,
    Deviation,
    Fixed,
    Gather,
    ModelLayers,
    Probed,
    Program,
    Recipe,
    Segments,
    Stock,
)
from vllm_segreuse.policies import POLICIES, Situation, focus, peaks

intervals = st.tuples(st.sampled_from("NRSA"), st.integers(1, 70))
prompts = st.lists(intervals, min_size=1, max_size=6).map(lambda parts: prompt_of(*parts))
ratios = st.sampled_from([None, 0.0, 0.01, 0.1, 0.15, 0.25, 0.5, 0.99, 1.0])
layers = st.sampled_from([0, 1, 2, 3, 7, 8, 9, 4096, 0.01, 0.15, 0.5, 0.99])


def prompt_of(*parts: tuple[str, int]) -> str:
    """`("S", 3), ("N", 2)` is `SRRNN`; reused tokens behind new ones begin a segment."""
    text = ""
    for kind, count in parts:
        begins = kind == "R" and text[-1:] in ("", "N")
        first = "S" if begins else kind
        text += first + ("N" if kind == "N" else "R") * (count - 1)
    return text


def situation(prompt: str, **options: Any) -> Situation:
    kinds = np.array(list(prompt))
    first = np.flatnonzero(np.isin(kinds, ["S", "A"])).astype(np.int32)
    behind = np.where(kinds[first] == "S", focus.FEW_TOKENS, focus.FEW_TOKENS - 1)
    return Situation(
        kinds != "N",
        Segments.elsewhere(first, behind.astype(np.int32)),
        **{
            "block_size": 16,
            "num_layers": 8,
            "recompute_ratio": 0.1,
            "dense_layers": 0,
            "overflow_tokens": None,
        }
        | options,
    )


def recipe_of(policy: str, prompt: str, **options: Any) -> Recipe:
    return POLICIES[policy](situation(prompt, **options))


def where(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


def program_of(expected: Definition) -> Program:
    """What carries a definition out that chooses tokens."""
    return {
        "boundary": Boundary(expected.dense),
        "deviation": Deviation(expected.dense),
        "sum": Probed(Gather.SUM, expected.least_share),
        "peak": Probed(Gather.MAX, expected.least_share),
        "both": Probed(
            Gather.SUM_AND_LAST, first_layer=expected.from_layer, levelling=0.75, carries=True
        ),
    }[expected.score]


def assert_is(recipe: Recipe, expected: Definition) -> None:
    if (
        expected.score == "both"
        and len(expected.always) + expected.at_most >= recipe.always.size - 1
    ):
        return  # all, or all but the token that floats may miss
    assert where(recipe.always) == sorted(expected.always)
    assert recipe.program.dense_layers == expected.dense
    # A budget of focus ends in an exact half now and then, which floats may miss.
    assert abs(recipe.top_k - expected.at_most) <= (expected.score == "both")
    if expected.at_most:
        assert where(recipe.probes) == sorted(expected.probes)
        assert recipe.program == program_of(expected)


def test_shift_computes_the_new_tokens():
    assert where(recipe_of("shift", "NNSRRNSRR").always) == [0, 1, 5]


def test_exact_computes_the_holes_by_the_models_own_forward():
    recipe = recipe_of("exact", "SRRRNNSRR")
    assert (where(recipe.always), recipe.top_k, recipe.program) == ([4, 5], 0, Stock())
    assert recipe_of("shift", "SRRRNNSRR").program == Fixed()


def test_epic_computes_the_first_tokens_of_every_segment():
    #         0         1         2
    #         0123456789012345678901234567
    prompt = "NSRRRRRRRSRRRNNSRRRRRRRRRRRN"
    recipe = recipe_of("epic", prompt, recompute_ratio=0.25)
    assert where(recipe.always) == [0, 1, 2, 9, 13, 14, 15, 16, 17, 27]
    assert (recipe.top_k, recipe.program) == (0, Fixed())
    recipe = recipe_of("epic", prompt, recompute_ratio=1.0, dense_layers=3)
    assert recipe.always.all()
    assert recipe.program == Fixed()


@pytest.mark.parametrize(
    ("dense_layers", "expected"),
    [(0, 1), (0.5, 1), (1, 1), (2, 2), (7, 7), (8, 7), (9, 7), (4096, 7)],
)
def test_cacheblend_has_one_dense_layer_or_more_and_one_to_compare_at(dense_layers, expected):
    recipe = recipe_of("cacheblend", "NSRRRRRRRRRN", recompute_ratio=0.2, dense_layers=dense_layers)
    assert (recipe.program, recipe.top_k) == (Deviation(expected), 2)
    assert where(recipe.always) == [0, 11]


def test_sparsex_is_the_union_of_the_papers_sets():
    prompt = prompt_of(("S", 40), ("N", 3), ("S", 60), ("N", 1), ("S", 20))
    recipe = recipe_of("sparsex", prompt, recompute_ratio=0.25, block_size=4)
    assert where(recipe.always) == [*range(36, 47), *range(99, 108)]
    assert where(recipe.probes) == [40, 41, 42, 103]
    assert (recipe.top_k, recipe.program) == (30, Boundary(0))
    hybrid = recipe_of("sparsex", prompt, recompute_ratio=0.25, block_size=4, dense_layers=0.15)
    assert hybrid.program == Boundary(1)
    assert (hybrid.always == recipe.always).all()


@pytest.mark.parametrize("dense_layers", [8, 9, 4096])
def test_with_all_layers_dense_there_is_nothing_to_choose(dense_layers):
    recipe = recipe_of("sparsex", "N" + "S" + "R" * 200 + "N", dense_layers=dense_layers)
    assert (recipe.program, recipe.top_k, recipe.always.all()) == (Fixed(8), 0, True)
    recipe = recipe_of("sparsex", "N" + "S" + "R" * 200 + "N", num_layers=1)
    assert (recipe.top_k, recipe.always.all()) == (0, True)
    recipe = recipe_of("sparsex", "N" + "S" + "R" * 200 + "N", dense_layers=7)
    assert (recipe.program, recipe.top_k, recipe.always.all()) == (Boundary(7), 20, False)


@pytest.mark.parametrize(
    ("prompt", "asking"),
    [
        (prompt_of(("N", 5), ("S", 10), ("N", 4), ("S", 6), ("N", 3)), [25, 26, 27]),
        (prompt_of(("N", 5), ("S", 10), ("N", 1)), [15]),
        (prompt_of(("N", 5), ("S", 10), ("N", 2), ("S", 20)), [15, 16]),
        (prompt_of(("N", 7)), [*range(7)]),
        (prompt_of(("N", 5), ("S", 64)), [*range(5, 69)]),
        (prompt_of(("N", 5), ("S", 65)), [*range(6, 70)]),
        (prompt_of(("N", 5), ("S", 63)), [*range(5)]),
        (prompt_of(("S", 90)), [*range(26, 90)]),
        (prompt_of(("S", 9)), [*range(9)]),
        (prompt_of(("S", 90), ("N", 256)), [*range(90, 346)]),
        (prompt_of(("S", 90), ("N", 257)), [*range(91, 347)]),
        (prompt_of(("S", 90), ("N", 300), ("S", 9)), [*range(134, 390)]),
    ],
)
def test_the_question_is_the_last_interval_of_new_tokens(prompt, asking):
    """Neither a preamble nor text between documents is; a reused tail asks for itself."""
    given = situation(prompt)
    assert where(given.question) == asking
    for policy in ("prophet", "peaks", "focus"):
        assert where(POLICIES[policy](given).probes) == asking


def test_new_text_between_documents_is_computed_though_it_does_not_ask():
    prompt = prompt_of(("N", 2), ("S", 30), ("N", 3), ("S", 30), ("N", 1))
    for policy, program in (
        ("prophet", Probed(Gather.SUM)),
        ("peaks", Probed(Gather.MAX, peaks.LEAST_SHARE)),
        ("focus", Probed(Gather.SUM_AND_LAST, first_layer=4, levelling=0.75, carries=True)),
    ):
        recipe = recipe_of(policy, prompt, recompute_ratio=0.2, dense_layers=3)
        assert where(recipe.always) == [0, 1, 32, 33, 34, 65]
        assert where(recipe.probes) == [65]
        assert (recipe.program, recipe.top_k) == (program, 12)


def test_peaks_computes_what_gets_a_twentieth_of_a_heads_attention():
    assert peaks.LEAST_SHARE == 0.05
    prompt = prompt_of(("S", 100), ("N", 1))
    for ratio in (0.01, 0.5, 0.999):
        recipe = recipe_of("peaks", prompt, recompute_ratio=ratio)
        assert recipe.program == Probed(Gather.MAX, 0.05)
        assert recipe.top_k == round(100 * ratio)
    assert recipe_of("prophet", prompt, recompute_ratio=0.5).program == Probed(Gather.SUM)


@pytest.mark.parametrize("policy", ["prophet", "peaks", "focus"])
def test_where_everything_is_to_be_chosen_nothing_is_probed(policy):
    """New text between segments is computed before the choice, and would not see it."""
    prompt = prompt_of(("S", 50), ("N", 3), ("S", 47), ("N", 1))
    recipe = recipe_of(policy, prompt, recompute_ratio=1.0)
    assert (recipe.program, recipe.top_k) == (Fixed(), 0)
    assert recipe.always.all()


def test_focus_counts_the_attention_of_the_second_half_of_the_layers():
    for layers, first in ((1, 0), (2, 1), (7, 3), (24, 12), (28, 14)):
        recipe = recipe_of("focus", prompt_of(("S", 100), ("N", 1)), num_layers=layers)
        assert recipe.program == Probed(
            Gather.SUM_AND_LAST, first_layer=first, levelling=0.75, carries=True
        )


def chosen_of(recipe: Recipe) -> int:
    """Reused tokens that are computed; three tokens are new."""
    return recipe.top_k or int(recipe.always.sum()) - 3


def test_focus_computes_of_each_segment_and_more_of_what_was_computed_alone():
    """A number and a share of each segment, and a least number; unless a ratio is given, which
    holds for all."""
    in_context, alone = ("S", 1000), ("A", 500)
    for parts, chosen, at_a_tenth in (
        ((in_context,), 70, 100),  # not 12 + 40
        ((in_context,) * 2, 104, 200),
        ((("S", 80),) * 30, 456, 240),  # 30 * (12 + 3.2)
        ((("S", 30),) * 20, 224, 60),  # a third of each, and 24
        ((("S", 45),) * 4, 70, 18),
        ((alone,), 123, 50),  # 70 + 13 + 40
        ((in_context, ("N", 5), alone), 123, 150),
        ((alone, in_context, in_context, alone), 210, 300),  # 104 + 106
        ((("A", 100),) * 10, 280, 100),
        ((("A", 30),) * 20, 318, 60),  # a third of each
        ((("S", 50),), 50, 5),
        ((("S", 20_000),), 812, 2000),
        ((("A", 20_000),), 1683, 2000),
    ):
        prompt = prompt_of(*parts, ("N", 3))
        assert chosen_of(recipe_of("focus", prompt, recompute_ratio=None)) == chosen
        assert chosen_of(recipe_of("focus", prompt, recompute_ratio=0.1)) == at_a_tenth


@pytest.mark.parametrize("policy", ["shift", "sparsex", "prophet", "peaks", "cacheblend", "epic"])
def test_other_policies_take_a_tenth_of_all(policy):
    prompt = prompt_of(("S", 90), ("N", 3), ("A", 100), ("N", 1))
    own, tenth = (recipe_of(policy, prompt, recompute_ratio=ratio) for ratio in (None, 0.1))
    assert (where(own.always), own.top_k) == (where(tenth.always), tenth.top_k)


@pytest.mark.parametrize("policy", ["sparsex", "prophet", "peaks", "focus", "cacheblend", "epic"])
def test_a_ratio_of_1_computes_everything(policy):
    prompt = prompt_of(("S", 90), ("N", 3), ("S", 100))
    recipe = recipe_of(policy, prompt, recompute_ratio=1.0)
    assert int(recipe.always.sum()) + recipe.top_k == len(prompt)
    assert not recipe.program.may_choose_fewer


def test_a_ratio_of_0_chooses_nothing():
    prompt = prompt_of(("S", 90), ("N", 3), ("S", 30))
    for policy in POLICIES:
        assert recipe_of(policy, prompt, recompute_ratio=0.0).top_k == 0
    assert where(recipe_of("epic", prompt, recompute_ratio=0.0).always) == [90, 91, 92]


@pytest.mark.parametrize("policy", ["sparsex", "prophet", "peaks", "focus", "cacheblend"])
def test_the_number_of_tokens_to_choose_is_a_share_of_the_reused_ones(policy):
    """Not of all tokens, and not of those that are left to choose from."""
    prompt = prompt_of(("N", 100), ("S", 200), ("N", 10))
    assert recipe_of(policy, prompt, recompute_ratio=0.3).top_k == 60


@given(prompts, ratios, layers, st.sampled_from([None, 0, 1, 5, 100]), st.sampled_from([1, 16]))
def test_every_policy_is_what_its_paper_says(prompt, ratio, dense, overflow, block):
    options = {
        "recompute_ratio": ratio,
        "dense_layers": dense,
        "overflow_tokens": overflow,
        "block_size": block,
    }
    focused = definitions.focus(prompt, ratio, 8)
    ratio = 0.1 if ratio is None else ratio
    expected = {
        "shift": definitions.shift(prompt),
        "exact": definitions.exact(prompt),
        "epic": definitions.epic(prompt, ratio),
        "cacheblend": definitions.cacheblend(prompt, ratio, dense, 8),
        "sparsex": definitions.sparsex(prompt, ratio, dense, overflow, block, 8),
        "prophet": definitions.prophet(prompt, ratio),
        "peaks": definitions.peaks(prompt, ratio),
        "focus": focused,
    }
    assert expected.keys() == POLICIES.keys()
    for policy, definition in expected.items():
        recipe = recipe_of(policy, prompt, **options)
        assert_is(recipe, definition)
        assert (recipe.program == Stock()) == (policy == "exact")


def test_a_long_last_text_is_not_read_twice():
    """A tool's answer with a question behind it: reading all of it twice would save nothing."""
    prompt = prompt_of(("N", 20), ("S", 400), ("N", 600))
    recipe = recipe_of("focus", prompt)
    counts, layers = recipe.counts(recipe.top_k), ModelLayers.of_full_attention(8)
    assert recipe.top_k > 0
    assert where(recipe.probes) == [*range(764, 1020)]
    assert recipe.program.cost(counts, layers) < 8 * len(prompt)
