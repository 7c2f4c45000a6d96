# SPDX-License-Identifier: Apache-2.0
"""The choice of a setting: divergence, bounds, and what is taken."""

import math
from random import Random

import pytest

from segreuse_tools.calibrate import search, verdict_table
from segreuse_tools.calibrate.search import (
    Setting,
    Trial,
    Verdict,
    agreement,
    cheapest,
    choose,
    divergence,
    halves,
    judge,
    most_likely,
)
from vllm_segreuse.config import RequestOptions


def logs(*shares: float) -> dict[int, float]:
    return {token: math.log(share) for token, share in enumerate(shares)}


def verdict(divergence_at_most: float, agreement_at_least: float, work: float) -> Verdict:
    """One whose means are better than its bounds."""
    return Verdict(
        work=work,
        divergence=divergence_at_most / 2,
        divergence_at_most=divergence_at_most,
        divergence_median=0.0,
        divergence_p90=0.0,
        agreement=1.0,
        agreement_at_least=agreement_at_least,
        tokens=1.0,
    )


def test_divergence_is_that_of_the_definition():
    assert divergence(logs(0.5, 0.5), logs(0.5, 0.5)) == 0
    expected = 0.75 * math.log(0.75 / 0.25) + 0.25 * math.log(0.25 / 0.75)
    assert divergence(logs(0.75, 0.25), logs(0.25, 0.75)) == pytest.approx(expected)


def test_a_token_that_is_not_known_counts_as_the_least_likely():
    full, other = logs(0.9, 0.1), {1: math.log(0.6), 2: math.log(0.4)}
    expected = 0.9 * math.log(0.9 / 0.4) + 0.1 * math.log(0.1 / 0.6)
    assert divergence(full, other) == pytest.approx(expected)


def test_what_only_full_prefill_knows_is_less_likely_than_all_that_the_other_knows():
    # Each has one likely token that the other does not list.
    full = {0: math.log(0.99), 1: math.log(1e-4)}
    other = {2: math.log(0.99), 3: math.log(1e-4)}
    assert divergence(full, other) > 0.99 * math.log(0.99 / 2e-4) - 0.1


def test_the_tail_counts_as_one_token():
    assert divergence(logs(*[0.2] * 4), logs(*[0.225] * 4)) == pytest.approx(
        0.8 * math.log(0.8 / 0.9) + 0.2 * math.log(0.2 / 0.1)
    )


@pytest.mark.parametrize("likely", [5, 50, 300])
@pytest.mark.parametrize("noise", [0.01, 0.3, 5.0])
def test_divergence_of_the_likeliest_tokens_is_a_lower_bound(likely, noise):
    rng = Random(1)
    for _ in range(20):
        full, other = {}, {}
        for token in range(300):
            full[token] = rng.gauss(0, 2)
            other[token] = full[token] + rng.gauss(0, noise)
        full, other = _normalised(full), _normalised(other)
        exact = sum(math.exp(p) * (p - other[token]) for token, p in full.items())
        found = divergence(_largest(full, likely), _largest(other, likely))
        assert 0 <= found <= exact + 1e-9
        assert found >= exact * {5: 0.0, 50: 0.2, 300: 1 - 1e-4}[likely]


def _normalised(logits: dict[int, float]) -> dict[int, float]:
    total = math.log(math.fsum(map(math.exp, logits.values())))
    return {token: logit - total for token, logit in logits.items()}


def _largest(logprobs: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(logprobs.items(), key=lambda it: -it[1])[:count])


def test_bounds_are_on_the_cautious_side_and_close_in():
    few = judge([Trial(0.1, 1.0, 0.2), Trial(0.3, 0.0, 0.4)] * 5)
    many = judge([Trial(0.1, 1.0, 0.2), Trial(0.3, 0.0, 0.4)] * 500)
    for found in (few, many):
        assert (found.divergence, found.agreement, found.work) == pytest.approx((0.2, 0.5, 0.3))
        assert found.divergence_at_most > 0.2
        assert found.agreement_at_least < 0.5
    assert many.divergence_at_most < few.divergence_at_most
    assert many.agreement_at_least > few.agreement_at_least


def test_agreement_of_all_is_no_proof():
    # Were the share 0.741, ten of ten would still happen in one of twenty calibrations.
    assert judge([Trial(0.0, 1.0, 0.1)] * 10).agreement_at_least == pytest.approx(0.05**0.1)
    assert judge([Trial(0.0, 0.0, 0.1)] * 10).agreement_at_least == 0
    assert judge([Trial(0.0, 1.0, 0.1)]).divergence_at_most == math.inf


def test_the_least_work_within_the_limits_is_taken():
    verdicts = [
        ("shift", verdict(0.5, 0.7, 0.02)),
        ("focus", verdict(0.01, 0.99, 0.05)),
        ("sparsex", verdict(0.01, 0.99, 0.4)),
    ]
    assert choose(verdicts, 0.05, 0.95) == verdicts[1]
    assert choose(verdicts, 1.0, 0.5) == verdicts[0]
    assert choose(verdicts, 0.001, 0.95) is None


def test_every_candidate_is_what_a_server_takes():
    for options in search.CANDIDATES:
        RequestOptions.model_validate(options)
    assert len({str(options) for options in search.CANDIDATES}) == len(search.CANDIDATES)


def test_limits_are_inclusive_and_both_count():
    found = verdict(0.05, 0.9, 0.5)
    assert found.keeps(0.05, 0.9)
    assert not found.keeps(0.0499, 0.9)
    assert not found.keeps(0.05, 0.9001)


def test_what_is_no_number_agrees_with_nothing():
    assert divergence({1: math.nan}, logs(0.5, 0.5)) == math.inf
    assert divergence(logs(0.5, 0.5), {0: math.nan, 1: -0.7}) == math.inf
    assert divergence(logs(0.5, 0.5), {0: -0.7, 1: -math.inf}) == math.inf
    found = judge([Trial(math.inf, 1.0, 0.1), Trial(0.0, 1.0, 0.1)])
    assert found.divergence_at_most == found.divergence_p90 == math.inf


def test_median_and_p90_are_of_the_divergences():
    found = judge([Trial(number / 10, 1.0, 0.1) for number in (9, 1, 3, 2, 5, 4, 7, 6, 8, 10)])
    assert (found.divergence_median, found.divergence_p90) == (0.55, 0.9)
    assert judge([Trial(0.0, 1.0, 0.1)] * 8 + [Trial(1.0, 1.0, 0.1)]).divergence_p90 == 1.0


def test_agreement_of_tokens_ends_with_the_first_that_differs():
    assert agreement([5, 6, 7, 8], [5, 6, 1, 8]) == 0.5
    assert agreement([5, 6], [5]) == 0.5, "an answer that ends too soon"
    assert agreement([5, 6], [5, 6, 7]) == 1.0
    assert agreement([5], [6]) == 0.0
    # Of the prompts, by the first token; of the tokens, by all of them.
    found = judge([Trial(0.0, 0.5, 0.1), Trial(0.0, 0.0, 0.1)])
    assert (found.agreement, found.tokens) == (0.5, 0.25)


def test_focus_is_tried_with_the_shares_of_its_own():
    assert {"policy": "focus"} in search.CANDIDATES


@pytest.mark.parametrize("count", [2, 3, 10, 11])
def test_no_prompt_both_chooses_and_checks(count):
    trials = [Trial(float(number), 1.0, 0.1) for number in range(count)]
    choosing, checking = halves(trials)
    assert [*choosing, *checking] == trials
    assert not {trial.divergence for trial in choosing} & {t.divergence for t in checking}
    assert 0 <= len(checking) - len(choosing) <= 1, "neither is without any"


def test_the_most_likely_token_is_the_largest():
    assert most_likely({5: -3.0, 7: -0.1, 9: -2.0}) == 7


@pytest.mark.parametrize("count", [1, 7])
def test_one_half_chooses(count):
    """Of settings that one half likes and the other does not, the first half's is taken."""
    good, bad = Trial(0.0, 1.0, 0.1), Trial(1.0, 0.0, 0.1)
    settings = [
        Setting({"policy": "a"}, [bad] * 30 + [good] * 30),
        Setting({"policy": "b"}, [good] * 30 + [bad] * 30),
    ]
    assert cheapest(settings[::-1] * count, 0.1, 0.9) == 0
    assert cheapest(settings * count, 0.1, 0.9) == 1
    assert cheapest(settings[:1], 0.1, 0.9) is None


def test_nothing_is_judged_by_no_trials():
    with pytest.raises(ValueError, match="no trials"):
        judge([])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "without similar text"),
        ({"policy": "focus", "recompute_ratio": 0.1}, "focus recompute_ratio=0.1"),
        (
            {"policy": "shift", "similarity": {"threshold": 0.5, "w_exact": {"2": 0, "all": 8}}},
            "shift threshold=0.5 w_exact={2: 0, all: 8}",
        ),
    ],
)
def test_settings_are_named_by_their_options(options, name):
    assert verdict_table.name_of(options) == name


TABLE = """\
KL: divergence of the first token from full prefill, in nats, by its 128 likeliest tokens and the \
rest together; first: share of prompts with the same first token; tokens: share of greedy tokens \
that are the same. Bounds are at 95 %.
  setting                                            work      KL  at most  median     p90  first  \
at least  tokens
  focus                                             0.200  0.0250   0.0500  0.0000  0.0000  1.000  \
   0.900   1.000
* shift                                             0.100  0.0050   0.0100  0.0000  0.0000  1.000  \
   0.950   1.000"""


def test_the_table_of_settings():
    rows = [("focus", verdict(0.05, 0.9, 0.2)), ("shift", verdict(0.01, 0.95, 0.1))]
    assert "\n".join(verdict_table.table(rows, 1)) == TABLE
    unmarked = TABLE.replace("* shift", "  shift")
    assert "\n".join(verdict_table.table(rows, None)) == unmarked


@pytest.mark.parametrize("length", [46, 47, 48, 60])
def test_long_names_have_room(length):
    lines = [*verdict_table.table([("x" * length, verdict(0.05, 0.9, 0.2))], 0)]
    begins = max(48, length + 1) + 2
    assert lines[1][begins:].startswith("   work      KL")
    assert lines[2][begins:].startswith("  0.200  0.0250")
    assert lines[2].startswith(f"* {'x' * length} ")


def test_a_row_stands_below_its_header():
    header = verdict_table.header()
    row = verdict_table.row("name", Verdict(1.0, 22.5, 33.25, 4.0, 5.0, 0.5, 0.25, 0.125))
    assert header.index("work") == len(f"{'':48}   ")
    assert row == (
        "name                                              1.000 22.5000  33.2500  4.0000  5.0000"
        "  0.500     0.250   0.125"
    )
    assert len(row) == len(header)


def test_the_file_says_where_it_is_from():
    text = verdict_table.as_yaml({"policy": "shift", "dense_layers": 0.1}, ("one", "two"))
    assert text == "# one\n# two\npolicy: shift\ndense_layers: 0.1\n"


def test_what_drift_says():
    drifting = [Trial(number / 10, 1.0, 0.1, drift=number) for number in (1, 2, 3, 4)]
    assert verdict_table.about_drift(drifting, 0.1) == (
        "drift has rank correlation 1.00 with KL; max_drift 1 is for a p90 of KL up to 0.1: on the "
        "prompts it was not chosen by, p90 0.0000, 100.0% in full"
    )
    alike = [Trial(number / 10, 1.0, 0.1, drift=2.5) for number in (1, 2, 3, 4)]
    assert verdict_table.about_drift(alike, 0.25) == (
        "drift has rank correlation - with KL; max_drift 2.5 is for a p90 of KL up to 0.25: on the "
        "prompts it was not chosen by, p90 0.4000, 0.0% in full"
    )
    unmeasured = [Trial(0.1, 1.0, 0.1)] * 4
    assert verdict_table.about_drift(unmeasured, 0.1) == "drift is not measured by this policy"
