# SPDX-License-Identifier: Apache-2.0
"""Conversations: what an earlier turn has moved stays as it is, or what later turns cost counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_segreuse.cache.conversations import ContinuingFinder, Conversations
from vllm_segreuse.methods import Methods
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature


class Continued(Feature):
    """Of one engine.

    Args:
        core: of the engine.
        methods: know how often prompts are continued.
    """

    name = "conversations"

    def __init__(self, core: Core, methods: Methods) -> None:
        self.conversations = Conversations(
            core.requests, core.namespaces, core.health, core.block_size
        )
        self.listeners = (self.conversations,)
        self._methods = methods
        self._block_size = core.block_size

    def admit(self, arriving: Arriving) -> None:
        """What later turns take as it is costs them nothing."""
        tracked, options = arriving.tracked, arriving.options
        is_moved = arriving.is_text and arriving.takes_turns and options.policy != "exact"
        if options.recompute_once and is_moved:
            finder = ContinuingFinder(tracked.method.finder, self.conversations)
            tracked.method = replace(tracked.method, finder=finder)
            self.conversations.take_part(tracked.request_id)
        elif options.weigh_turns:
            tracked.method = replace(tracked.method, later_turns=self._methods.later_turns)

    def allocated(self, admitted: Admitted) -> None:
        """Count how often prompts are continued."""
        tracked, size = admitted.tracked, self._block_size
        if tracked.method.later_turns is not None and admitted.is_first:
            _, exact_end = tracked.exact_ends
            names = tracked.prompt.names(0, len(admitted.block_ids))
            exact = min(exact_end // size, len(names))
            self._methods.turns.began(names, len(admitted.hit_blocks), exact)

    def finished(self, ending: Ending) -> None:
        """Its blocks stay to be found."""
        self.conversations.ended(ending.request.request_id)

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> None:
        """What the step named may be found from the next on."""
        self.conversations.begin_step()
