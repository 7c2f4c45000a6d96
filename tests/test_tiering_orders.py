# SPDX-License-Identifier: Apache-2.0
"""Reports of the second tier are summed over ranks and steps."""

from collections import Counter

from vllm_segreuse.plan import TierDone


def test_reports_of_ranks_are_summed_by_sequence() -> None:
    one = TierDone(Counter({1: 1, 2: 1}), {2})
    other = TierDone(Counter({2: 1}))
    both = one.merged(other)
    assert both.ranks == {1: 1, 2: 2}
    assert both.failed == {2}
    assert one.ranks == {1: 1, 2: 1}, "as it was"


def test_what_the_codec_cannot_store_on_any_rank_is_in_the_sum() -> None:
    one = TierDone(Counter({1: 1}), without_code={(1, 0), (1, 2)})
    other = TierDone(Counter({1: 1}), without_code={(1, 2), (1, 3)})
    assert one.merged(other).without_code == {(1, 0), (1, 2), (1, 3)}


def test_a_report_of_nothing_is_false() -> None:
    assert not TierDone()
    assert TierDone(Counter({3: 1}))
