# SPDX-License-Identifier: Apache-2.0
"""Conversations: what an earlier turn has moved stays as it is, or what later turns cost counts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from segreuse_extras.conversations.conversations import Conversations
from segreuse_extras.conversations.options import ConversationOptions
from segreuse_extras.conversations.turns import Turns
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Continued(Feature):
    """Of one engine.

    Args:
        core: of the engine.

    Attributes:
        turns: how often prompts are continued.
    """

    name = "conversations"

    def __init__(self, core: Core) -> None:
        self.conversations = Conversations(
            core.requests, core.namespaces, core.health, core.block_size
        )
        self.listeners = (self.conversations,)
        self.turns = Turns()
        self._running: dict[str, tuple[Any, ...]] = {}  # whole prompts that were counted, by id
        self._block_size = core.block_size

    def admit(self, arriving: Arriving) -> None:
        """What later turns take as it is costs them nothing. Who wants everything computed again
        takes nothing."""
        tracked, options = arriving.tracked, arriving.options
        asked = ConversationOptions.of(options)
        is_moved = arriving.is_text and arriving.takes_turns and options.policy != "exact"
        if asked.recompute_once and is_moved:
            if options.recompute_ratio != 1.0:
                found = self.conversations.found
                tracked.method = replace(tracked.method, left_behind=(found,))
            self.conversations.take_part(tracked.request_id)
        elif asked.weigh_turns:
            tracked.method = replace(tracked.method, later_turns=self.later_turns)

    def later_turns(self) -> float:
        """Turns that a conversation is expected to have yet."""
        return self.turns.later

    def allocated(self, admitted: Admitted) -> None:
        """Count how often prompts are continued. Equal ones at once are no later turns of each
        other: they lose nothing where one of them is reused (`segreuse_extras/coalescing/`)."""
        tracked, size = admitted.tracked, self._block_size
        if tracked.method.later_turns is None or not admitted.is_first:
            return
        _, exact_end = tracked.exact_ends
        names = tracked.prompt.names(0, len(admitted.block_ids))
        exact = min(exact_end // size, len(names))
        session = session_of(admitted.request, tracked.prompt.namespace)
        whole = session, tracked.prompt.whole(size)
        if whole not in self._running.values():
            self.turns.began(names, len(admitted.hit_blocks), exact, session)
        self._running[tracked.request_id] = whole

    def finished(self, ending: Ending) -> None:
        """Its blocks stay to be found."""
        self.conversations.ended(ending.request.request_id)
        self._running.pop(ending.request.request_id, None)

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> None:
        """What the step named may be found from the next on."""
        self.conversations.begin_step()


def session_of(request: Request, namespace: int) -> bytes | None:
    """What names the session of a request, however long its id is; None: it has none.

    Args:
        namespace: an id says nothing of sessions elsewhere.
    """
    session = request.session_id
    if not isinstance(session, str) or not session:
        return None
    text = f"{namespace} {session}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def start(making: Making) -> Continued:
    """That of an engine."""
    return Continued(making.core)
