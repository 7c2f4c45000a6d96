# SPDX-License-Identifier: Apache-2.0
"""Arms that need no replay of their own, since they would do what another one does.

What a request finds depends on what donates, and that on which tokens were computed at every layer
(`scheduling/donors.py`). Where policies compute other tokens of the same blocks, only what their
plans come to differs. So each policy is compared with the one that is replayed, plan by plan, up to
the first block that only one of them would let donate.

This holds for requests that run one by one. Of several, how many tokens a plan computes decides
when the next one is admitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from segreuse_extras.audit.options import AuditOptions
from segreuse_tools.estimate.other_options import computed_by, finds_alike
from segreuse_tools.estimate.replay import Replayed
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.parsing import parse_request
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.scheduling.tracked import NOTHING_SAVED

if TYPE_CHECKING:
    from segreuse_tools.estimate.prompt_rendering import Asked
    from vllm_segreuse.plan import BoolArray, ModelLayers, ReusePlan
    from vllm_segreuse.scheduling.scheduler import SchedulerSide


@dataclass(frozen=True)
class Arm:
    """What one row of an estimate is about.

    Attributes:
        config: of the server.
        policy: of requests that name none; None: prefix caching alone.
    """

    config: SegReuseConfig
    policy: str | None

    @cached_property
    def options(self) -> SegReuseConfig:
        """The server's, with this policy; switched on, and without what reads or writes its files
        (audits, the second tier, the file of its knowledge bases), and what an idle engine or
        another one does."""
        changed = {
            "policy": self.policy or self.config.policy,
            "enabled": True,
            "observe": False,
            "audit": AuditOptions(),
            "tier": None,
            "knowledge_path": None,
            "heal_tokens": 0,
            "beside": None,
        }
        return self.config.model_copy(update=changed)

    def sent(self, one: Asked) -> Asked:
        """A request as it is sent."""
        return replace(one, extra_args={}) if self.policy is None else one

    def of(self, one: Asked) -> PolicyOptions:
        """The options of a request."""
        return parse_request(one.extra_args, self.options, trusted=True).options


@dataclass
class Twin:
    """An arm beside the one that is replayed.

    Attributes:
        arm: this one.
        replayed_arm: the other.
        side: of the other.
        layers: of the model.
        block_size: tokens per block.
        agrees: whether it would have done the same so far.
    """

    arm: Arm
    replayed_arm: Arm
    side: SchedulerSide
    layers: ModelLayers
    block_size: int
    agrees: bool = True
    _is_planned: bool = False
    _figures: dict[int, dict[str, Any]] = field(default_factory=dict)  # by request

    def arrived(self, one: Asked) -> None:
        """A request of the log arrives."""
        if self.agrees and self.arm.policy is not None and one.extra_args:
            arms = self.arm.of(one), self.replayed_arm.of(one)
            self.agrees = finds_alike(self.arm.options, *arms)

    def planned(self, plan: ReusePlan, index: int, one: Asked) -> None:
        """A plan of the arm that is replayed.

        Args:
            index: of its request.
            one: the request.
        """
        if not self.agrees:
            return
        if self.arm.policy is None:
            self.agrees = False
            return
        token_ids = np.asarray(one.token_ids, np.int32)
        mine = computed_by(self.side.parts, plan, self.arm.of(one), token_ids)
        if mine is None:
            self.agrees = False
            return
        mine_whole, whole = (_whole_blocks(each, self.block_size) for each in (mine, plan))
        self.agrees = np.array_equal(mine_whole, whole)
        self._is_planned |= mine.reports
        self._figures[index] = {
            "recomputed_tokens": mine.num_recomputed,
            "computed_share": mine.computed_share(self.layers, len(one.token_ids)),
        }

    def agrees_with(self, other: Replayed) -> bool:
        """Whether it would have done the same all along. Where the other arm found something that
        was not worth it, it might have been for this one."""
        reasons = [report and report["bypass_reason"] for report in other.reports]
        return self.agrees and NOTHING_SAVED not in reasons

    def replayed(self, other: Replayed) -> Replayed:
        """What a replay would have come to, if it agrees with that of the other arm."""
        reports = [
            None if self.arm.policy is None or report is None else report | self._of(index)
            for index, report in enumerate(other.reports)
        ]
        return replace(other, reports=reports, is_planned=self._is_planned)

    def _of(self, index: int) -> dict[str, Any]:
        return self._figures.get(index, {})


def _whole_blocks(plan: ReusePlan, block_size: int) -> BoolArray:
    """bool `[blocks]`: which blocks of a plan's pieces have every token computed at every layer."""
    settled = plan.recipe.settled[: plan.pieces.stop - plan.start]  # of the others all are
    first = plan.start % block_size
    padded = np.ones(-(-(first + len(settled)) // block_size) * block_size, np.bool_)
    padded[first : first + len(settled)] = settled
    return np.asarray(padded.reshape(-1, block_size).all(axis=1))
