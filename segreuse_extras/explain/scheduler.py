# SPDX-License-Identifier: Apache-2.0
"""Requests whose report says where each stretch of their prompt comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from segreuse_extras.context.finder import SameContextFinder
from segreuse_extras.explain.adapters import RecentAdapters
from segreuse_extras.explain.edits import Edit, edit_of
from segreuse_extras.explain.forgotten import Forgotten
from segreuse_extras.explain.options import ExplainOptions
from segreuse_extras.explain.reasons import (
    NOT_WORTH_IT,
    Reasons,
    Unused,
    WhyNew,
    explain,
    refused_in_other_context,
    unexplored,
    with_acceptance,
    with_left_behind,
    with_recomputed,
)
from vllm_segreuse.plan import PlanOutcome, ReusePlan
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.tracked import IMAGES_IN_DENSE_LAYERS, NOTHING_SAVED, TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

FORGOTTEN_PER_BLOCK = 4
"""Blocks that no longer donate are remembered, for each that there is: 36 bytes."""

SEARCHED = (
    None,
    "observed",
    "too_few_reused_tokens",
    "no_free_blocks",
    NOTHING_SAVED,
    IMAGES_IN_DENSE_LAYERS,
)
"""Reasons for which a request runs as it does after its prompt was searched for."""


@dataclass
class _Explained:
    """Of a request.

    Attributes:
        other_adapters: keys of the namespaces that differ from its own by the LoRA adapter only.
        stretches: of its prompt at its first admission; None: nothing was decided.
        edit: where it departs from an earlier prompt; None: nothing is known of one.
    """

    other_adapters: Sequence[bytes]
    stretches: list[dict[str, Any]] | None = None
    edit: Edit | None = None


class Explaining(Feature):
    """Of one engine.

    Args:
        core: of the engine.
        forgotten: what donates no more.

    Attributes:
        adapters: that requests have named lately.
    """

    name = "explain"

    def __init__(self, core: Core, forgotten: Forgotten) -> None:
        self._core = core
        self._forgotten = forgotten
        self.followers = (forgotten,)
        self.adapters = RecentAdapters()
        self._explained: dict[str, _Explained] = {}

    def admit(self, arriving: Arriving) -> None:
        """Remember its adapter, and whether it asks for an explanation."""
        request, keys, tracked = arriving.request, arriving.extra_keys, arriving.tracked
        assert keys is not None
        self.adapters.note(request)
        if ExplainOptions.of(arriving.options).explain:
            others = self.adapters.others(request, keys, arriving.images)
            self._explained[request.request_id] = _Explained(others)
            tracked.tags = tracked.tags._replace(explains=True)

    def decided(
        self, request: Request, tracked: TrackedRequest, supplied: int | None
    ) -> int | None:
        """Explain now: once it is allocated, its own blocks are in the index."""
        found = self._explained.get(request.request_id)
        if found is not None and tracked.report is None:
            found.stretches = self._stretches(tracked, found)
        return supplied

    def allocated(self, admitted: Admitted) -> None:
        """Explain what was not searched for."""
        found, tracked = self._explained.get(admitted.request.request_id), admitted.tracked
        if found is None or not admitted.is_first:
            return
        left = tracked.left_behind
        reason = tracked.decision.reason if tracked.plan is None else None
        if reason not in SEARCHED or found.stretches is None:
            start = tracked.decision.start
            found.stretches = unexplored(start, tracked.num_tokens, reason or "no_match")
        if left.num_tokens:
            found.stretches = with_left_behind(found.stretches, left.start)

    def carried_out(self, request_id: str, plan: ReusePlan, outcome: PlanOutcome) -> None:
        """Which of its tokens were computed is known now."""
        found = self._explained.get(request_id)
        if found is None or found.stretches is None:
            return
        if outcome.positions is not None:
            positions = np.asarray(outcome.positions, np.int32)
            found.stretches = with_recomputed(found.stretches, positions)
        if plan.check is not None and outcome.acceptance is not None:
            found.stretches = with_acceptance(
                found.stretches, plan.start, plan.check, outcome.acceptance.drifts
            )

    def finished(self, ending: Ending) -> None:
        """Report it."""
        found = self._explained.pop(ending.request.request_id, None)
        if found is not None and found.stretches is not None:
            ending.add(explain=found.stretches)
            if found.edit is not None:
                ending.add(edit=found.edit._asdict())

    def _stretches(
        self, tracked: TrackedRequest, explained: _Explained
    ) -> list[dict[str, Any]] | None:
        """Where each stretch of a prompt comes from that was just decided on; None if nothing was
        searched for."""
        plan, decision = tracked.plan or tracked.observed, tracked.decision
        if plan is not None:
            pieces = plan.copied
        elif decision.reason in SEARCHED and decision.found is not None:
            pieces = decision.found.pieces
            if tracked.left_behind.num_tokens:  # the request reuses that, and nothing of these
                pieces = pieces.where(np.zeros(len(pieces), np.bool_))
        else:
            return None
        if decision.found is not None:
            finder = tracked.method_in_force.finder
            found = finder.found if isinstance(finder, SameContextFinder) else decision.found
            explained.edit = edit_of(self._core.index, tracked.prompt, found.pieces, decision.start)
        reason = self._why_not_reused(tracked, explained)
        if decision.given_up is not None:
            reason = Unused(decision.given_up, "no_free_blocks", reason)
        images, start, new_image = tracked.prompt.images, decision.start, None
        if images is not None:
            new_image = images.first_new(pieces.reused(start, tracked.num_tokens - 1), start)
            pieces = pieces if new_image is None else pieces.up_to(new_image)
        stretches = explain(pieces, start, tracked.num_tokens, reason, new_image)
        return with_recomputed(stretches, plan.recomputed_positions if plan else None)

    def _why_not_reused(self, tracked: TrackedRequest, explained: _Explained) -> WhyNew:
        """The reason for each text of a prompt that is in no plan of it."""
        bypass = tracked.bypass
        if bypass is not None:  # it is restored only
            return lambda start, stop: bypass
        if tracked.method.finder.is_exact:
            return lambda start, stop: "not_cached"
        namespaces = self._core.namespaces
        others = [namespaces.find(key) for key in explained.other_adapters]
        known = [namespace for namespace in others if namespace is not None]
        reason: WhyNew = Reasons(tracked.prompt, self._core.index, self._forgotten, known)
        if isinstance(tracked.method_in_force.finder, SameContextFinder):
            reason = refused_in_other_context(reason)
        found = tracked.decision.found
        return reason if found is None else Unused(found.pieces, NOT_WORTH_IT, reason)


def start(making: Making) -> Explaining:
    """That of an engine."""
    core = making.core
    capacity = FORGOTTEN_PER_BLOCK * core.num_blocks
    return Explaining(core, Forgotten(core.index, core.namespaces, capacity))
