# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens is deterministic and the same on every rank."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.test_batch import CPU, plans
from tests.prefill.tiny import SIZE
from vllm_segreuse.plan import Boundary, Fate, Gather, Probed, Recipe
from vllm_segreuse.prefill import selection
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.selection import TokenSegments, choose_tokens


def choose(scores: list[torch.Tensor], *options: Any, **more: Any) -> torch.Tensor:
    """What is chosen by scores that are numbers."""
    chosen, numbers = selection.choose(scores, *options, **more)
    assert numbers.tolist() == [True] * len(scores)
    return chosen


@dataclass
class Group:
    """One rank of a tensor parallel group, as `choose` sees it.

    Attributes:
        others: what the other ranks add in the all-reduce.
        chosen: what rank 0 broadcasts; None: this is rank 0.
        calls: collectives in order.
    """

    world_size: int = 1
    others: torch.Tensor | float = 0.0
    chosen: torch.Tensor | None = None
    calls: list[str] = field(default_factory=list)

    def all_reduce(self, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        assert not scores.isinf().any()
        return scores + self.others

    def all_gather(self, scores: torch.Tensor, dim: int) -> torch.Tensor:
        self.calls.append("all_gather")
        assert dim == 0
        return torch.cat([scores, torch.as_tensor(self.others).expand_as(scores)])

    def broadcast(self, chosen: torch.Tensor, src: int) -> torch.Tensor:
        self.calls.append("broadcast")
        assert src == 0
        return chosen if self.chosen is None else self.chosen


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr(selection, "get_tp_group", lambda: group)
    return group


def test_the_largest_are_chosen_in_order_of_position(group: Group) -> None:
    scores = [torch.tensor([1.0, 5.0, 3.0, 4.0]), torch.tensor([9.0, 8.0])]
    assert choose(scores, [2, 1]).tolist() == [1, 3, 4]
    assert group.calls == []


def test_ties_go_to_the_first(group: Group) -> None:
    many = torch.zeros(10_000)
    many[5000] = 1.0
    assert choose([many], [100]).tolist() == [*range(99), 5000]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_excluded_tokens_are_never_chosen(group: Group, k: int) -> None:
    scores = torch.tensor([float("-inf"), -7.0, float("-inf"), 0.0, -1e30])
    assert choose([scores], [k]).tolist() == [[], [3], [1, 3, 4]][min(k, 2)]


def two_segments(*begin: float) -> tuple[torch.Tensor, TokenSegments]:
    """Scores of two segments of seven tokens each, behind a token that is in none; the first four
    of either are given. Of the others the first segment's are a hundred times as large."""
    inside = torch.tensor([6.0, 3.0, 3.0, 1.0, 1.0, 0.5])
    scores = [torch.tensor([float("-inf")])]
    for factor in (100, 1):
        scores += [torch.tensor(begin), factor * inside[:3]]
    first = torch.tensor([0] + [1] * 7 + [8] * 7)
    stop = torch.tensor([0] + [8] * 7 + [15] * 7)
    counts = torch.tensor([False] + ([False] * 4 + [True] * 3) * 2)
    return torch.cat(scores), TokenSegments(first, stop, counts)


def test_scores_are_compared_within_segments_the_more_they_are_levelled(group: Group) -> None:
    scores, segments = two_segments(0, 0, 0, 0)
    for levelling, expected in ((0.0, [5, 6, 7]), (0.5, [5, 6, 7]), (0.999, [5, 6, 12])):
        chosen = choose([scores], [3], segments=segments, levelling=levelling)
        assert chosen.tolist() == expected
    assert choose([scores], [3]).tolist() == [5, 6, 7]


def test_what_begins_a_segment_is_not_in_its_mean(group: Group) -> None:
    """Or what everything attends to would hide all else of its segment."""
    for begin in ((0, 0, 0, 0), (1e9, 0, 0, 0)):
        scores, segments = two_segments(*begin)
        number = 3 + 2 * (begin[0] > 0)
        chosen = choose([scores], [number], segments=segments, levelling=0.999)
        assert set(chosen.tolist()) - {1, 8} == {5, 6, 12}


def test_segments_without_attention_and_nan_leave_others_as_they_are(group: Group) -> None:
    scores, segments = two_segments(0, 0, 0, 0)
    none = scores.clone()
    none[8:] = 0.0
    assert choose([none], [3], segments=segments, levelling=0.75).tolist() == [5, 6, 7]
    bad = scores.clone()
    bad[5] = float("nan")
    chosen, numbers = selection.choose(
        [bad[:8], scores[8:]], [1, 2], segments=segments, levelling=0.75
    )
    assert numbers.tolist() == [False, True]
    assert chosen[1:].tolist() == [12, 13]


def test_segments_are_those_of_the_batch(group: Group) -> None:
    """As a loop finds them, whatever there is in one."""
    given = plans(program=Probed(Gather.SUM, levelling=0.75), top_k=2)
    batch = Batch(given, SIZE, CPU)
    runs = batch.runs_of_candidates
    assert (runs >= 0).any()
    scores = torch.rand(len(batch.tokens), generator=torch.manual_seed(0))
    expected, first = [], 0
    for plan, length in zip(batch.plans, batch.lengths, strict=True):
        levelled = {}
        for i in range(first, first + length):
            if runs[i] >= 0:
                run = np.flatnonzero(runs == runs[i])
                mean = scores[torch.as_tensor(run[4:] if len(run) > 4 else run)].mean()
                levelled[i] = float(scores[i] / mean**0.75)
        expected += sorted(levelled, key=lambda i: -levelled[i])[: plan.recipe.top_k]
        first += length
    choice = choose_tokens(batch, scores, levelling=0.75)
    assert choice.chosen.tolist() == sorted(expected)


def test_scores_of_all_ranks_decide(group: Group) -> None:
    group.world_size, group.others = 2, torch.tensor([0.0, 9.0, 3.0, 0.0, 1.0])
    scores = [torch.tensor([2.0, float("-inf"), 0.0]), torch.tensor([1.0, 0.5])]
    assert choose(scores, [1, 1]).tolist() == [2, 4]
    assert group.calls == ["all_reduce", "broadcast"]


def test_the_highest_peak_of_any_rank_decides(group: Group) -> None:
    group.world_size, group.others = 2, torch.tensor([0.3, float("-inf"), 0.1, 0.0, 0.6])
    scores = [torch.tensor([0.2, float("-inf"), 0.25]), torch.tensor([0.5, 0.1])]
    assert choose(scores, [1, 2], Gather.MAX, 0.28).tolist() == [0, 3, 4]
    assert group.calls == ["all_gather", "broadcast"]


def test_the_geometric_mean_of_two_sums_over_all_ranks_decides(group: Group) -> None:
    inf = float("inf")
    group.world_size = 2
    group.others = torch.tensor([[1.0, 0.0, 2.0, 1.0], [1.0, 0.0, 2.0, 7.0]])
    scores = [torch.tensor([[8.0, -inf, 2.0, 0.0], [0.0, -inf, 2.0, 0.0]])]
    # sqrt of 9 * 1, 4 * 4 and 1 * 7
    assert choose(scores, [1], Gather.SUM_AND_LAST).tolist() == [2]
    assert choose(scores, [2], Gather.SUM_AND_LAST).tolist() == [0, 2]
    assert choose(scores, [4], Gather.SUM_AND_LAST).tolist() == [0, 1, 2, 3]
    assert group.calls == ["all_reduce", "broadcast"] * 3


def test_a_mean_over_ranks_is_that_of_rank_0_to_the_last_bit(group: Group) -> None:
    mine = torch.tensor([1.0, 3.0])
    assert selection.mean_over_ranks(mine) is mine
    assert group.calls == []
    group.world_size, group.others = 2, torch.tensor([3.0, 4.0])
    assert selection.mean_over_ranks(mine).tolist() == [2.0, 3.5]
    assert group.calls == ["all_reduce", "broadcast"]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_choice_of_rank_0_is_everyones(group: Group, threshold: float) -> None:
    group.world_size, group.chosen = 2, torch.tensor([2, 0, 4])
    scores = [torch.tensor([3.0, 2.0, 1.0]), torch.tensor([4.0, 1.0])]
    assert choose(scores, [2, 1], threshold=threshold).tolist() == [0, 2, 4]


def test_ranks_take_over_that_fewer_were_chosen(group: Group) -> None:
    group.world_size, group.chosen = 2, torch.tensor([2, -1, 3])
    scores = [torch.tensor([3.0, 2.0, 1.0]), torch.tensor([4.0, 1.0])]
    assert choose(scores, [2, 1], threshold=0.5).tolist() == [2, 3]


def test_of_the_largest_those_below_the_least_are_left_out(group: Group) -> None:
    scores = [torch.tensor([0.1, 0.9, 0.5, 0.49]), torch.tensor([0.8, 0.7, 0.6])]
    assert choose(scores, [3, 2], threshold=0.5).tolist() == [1, 2, 4, 5]
    assert choose(scores, [3, 0], threshold=0.95).tolist() == []


def test_a_share_that_is_just_enough_counts(group: Group) -> None:
    share = 0.05  # rounded to float32, as scores are
    below = torch.tensor(share).nextafter(torch.tensor(0.0))
    scores = torch.stack([torch.tensor(share), below, torch.tensor(0.9)])
    assert choose([scores], [3], Gather.MAX, share).tolist() == [0, 2]


def test_ties_go_to_the_first_among_those_that_are_enough(group: Group) -> None:
    scores = [torch.tensor([0.5, 0.9, 0.5, 0.5]), torch.tensor([0.6, 0.6, 0.6])]
    assert choose(scores, [3, 1], Gather.MAX, 0.5).tolist() == [0, 1, 2, 4]


def test_more_than_there_are_is_all_there_are(group: Group) -> None:
    assert choose([torch.tensor([1.0, 2.0]), torch.tensor([0.0])], [5, 5]).tolist() == [0, 1, 2]


def test_only_a_threshold_waits_for_the_device(group: Group) -> None:
    """Where the number is known beforehand, everybody gets as many as he asked for."""
    scores = [torch.tensor([0.0, 0.0, 0.0]), torch.tensor([-1.0, 0.0])]
    assert choose(scores, [2, 1]).tolist() == [0, 1, 4]


def test_the_same_scores_give_the_same_choice(group: Group) -> None:
    torch.manual_seed(0)
    scores = [torch.randint(0, 5, (300,)).float(), torch.randint(0, 3, (200,)).float()]
    expected = []
    for first, (part, k) in zip((0, 300), zip(scores, (40, 70), strict=True), strict=True):
        ranked = sorted(range(len(part)), key=lambda i: (-float(part[i]), i))
        expected += sorted(first + i for i in ranked[:k])
    for _ in range(3):
        assert choose([part.clone() for part in scores], [40, 70]).tolist() == expected


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("gather", Gather)
def test_it_is_reported_whose_scores_are_no_numbers(
    group: Group, ranks: int, gather: Gather
) -> None:
    """Of any rank: all of them have to compute the same plans again."""
    inf, nan = float("inf"), float("nan")
    mine = [torch.tensor([0.3, nan]), torch.tensor([0.1, -inf]), torch.tensor([0.2, inf])]
    group.world_size = ranks
    group.others = torch.tensor([0.0, 0.0, nan, 0.0, 0.0, 0.0])
    if gather is Gather.MAX and ranks == 1:
        mine[0] = torch.tensor([nan, -inf])
    if gather is Gather.SUM_AND_LAST:  # the same twice; the mean of equal ones is what they are
        mine = [torch.stack([scores, scores]) for scores in mine]
    _, numbers = selection.choose(mine, [1, 1, 1], gather)
    assert numbers.tolist() == [False, ranks == 1, True]


@pytest.mark.parametrize("threshold", [0.0, 0.25])
def test_every_plan_chooses_its_own_beside_what_is_always_computed(
    threshold: float, group: Group
) -> None:
    given = plans(program=Boundary(), top_k=2)
    fates = given[0].recipe.fates.copy()
    fates[4] = Fate.MOVED
    given[0] = replace(given[0], recipe=Recipe.of(Boundary(), fates, top_k=2))
    batch = Batch(given, SIZE, CPU)
    scores = torch.zeros(15)
    scores[[0, 5, 8, 11, 12, 14]] = 9.0  # always computed: they take nobody's place
    scores[4] = 9.0  # never chosen
    scores[[2, 3, 7]] = torch.tensor([0.25, 0.1, 0.3])
    scores[[9, 13]] = torch.tensor([0.2, 0.5])
    before = scores.clone()
    choice = choose_tokens(batch, scores, threshold=threshold)
    chosen = [2, 7, 13] if threshold else [2, 7, 9, 13]
    assert choice.beside(batch.always).device.tolist() == sorted([0, 5, 8, 11, 12, 14, *chosen])
    assert choice.chosen.tolist() == chosen
    assert choice.counts == [2, 2, 0]
    assert torch.equal(scores, before)
    assert batch.sound.tolist() == [True] * 3
    assert batch.always.device.tolist() == [0, 5, 8, 11, 12, 14]


@pytest.mark.parametrize(
    ("gather", "collective"), [(Gather.MAX, "all_gather"), (Gather.SUM, "all_reduce")]
)
def test_ranks_put_peaks_and_sums_together_each_in_their_way(
    gather: Gather, collective: str, group: Group
) -> None:
    group.world_size = 2
    choose_tokens(Batch(plans(program=Boundary(), top_k=1), SIZE, CPU), torch.zeros(15), gather)
    assert group.calls == [collective, "broadcast"]


def test_scores_that_are_no_numbers_are_reported_of_their_plan(group: Group) -> None:
    batch = Batch(plans(program=Boundary(), top_k=1), SIZE, CPU)
    scores = torch.zeros(15)
    scores[10] = torch.nan
    scores[0] = torch.nan  # of a token that is computed whatever it is
    choose_tokens(batch, scores)
    assert batch.sound.tolist() == [True, False, True]
