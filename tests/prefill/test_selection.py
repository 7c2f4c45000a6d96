# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens is deterministic and the same on every rank."""

from dataclasses import dataclass, field

import pytest
import torch

from vllm_segreuse.prefill import selection
from vllm_segreuse.prefill.selection import choose


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
        assert scores.isfinite().all()
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
    assert choose(scores, [2, 1], 0.0).tolist() == [1, 3, 4]
    assert group.calls == []


def test_ties_go_to_the_first(group: Group) -> None:
    many = torch.zeros(10_000)
    many[5000] = 1.0
    assert choose([many], [100], 0.0).tolist() == [*range(99), 5000]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_excluded_tokens_are_never_chosen(group: Group, k: int) -> None:
    scores = torch.tensor([float("-inf"), -7.0, float("-inf"), 0.0, -1e30])
    assert choose([scores], [k], 0.0).tolist() == [[], [3], [1, 3, 4]][min(k, 2)]


def test_scores_of_all_ranks_decide(group: Group) -> None:
    group.world_size, group.others = 2, torch.tensor([0.0, 9.0, 3.0, 0.0, 1.0])
    scores = [torch.tensor([2.0, float("-inf"), 0.0]), torch.tensor([1.0, 0.5])]
    assert choose(scores, [1, 1], 0.0).tolist() == [2, 4]
    assert group.calls == ["all_reduce", "broadcast"]


def test_the_highest_peak_of_any_rank_decides(group: Group) -> None:
    group.world_size, group.others = 2, torch.tensor([0.3, float("-inf"), 0.1, 0.0, 0.6])
    scores = [torch.tensor([0.2, float("-inf"), 0.25]), torch.tensor([0.5, 0.1])]
    assert choose(scores, [1, 2], 0.28, highest=True).tolist() == [0, 3, 4]
    assert group.calls == ["all_gather", "broadcast"]


@pytest.mark.parametrize("least_share", [0.0, 0.5])
def test_the_choice_of_rank_0_is_everyones(group: Group, least_share: float) -> None:
    group.world_size, group.chosen = 2, torch.tensor([2, 0, 4])
    scores = [torch.tensor([3.0, 2.0, 1.0]), torch.tensor([4.0, 1.0])]
    assert choose(scores, [2, 1], least_share).tolist() == [0, 2, 4]


def test_ranks_take_over_that_fewer_were_chosen(group: Group) -> None:
    group.world_size, group.chosen = 2, torch.tensor([2, -1, 3])
    scores = [torch.tensor([3.0, 2.0, 1.0]), torch.tensor([4.0, 1.0])]
    assert choose(scores, [2, 1], 0.5).tolist() == [2, 3]


def test_of_the_largest_those_below_the_least_are_left_out(group: Group) -> None:
    scores = [torch.tensor([0.1, 0.9, 0.5, 0.49]), torch.tensor([0.8, 0.7, 0.6])]
    assert choose(scores, [3, 2], 0.5).tolist() == [1, 2, 4, 5]
    assert choose(scores, [3, 0], 0.95).tolist() == []
