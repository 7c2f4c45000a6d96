# SPDX-License-Identifier: Apache-2.0
"""Requests of an idle engine that compute conversations in full, a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.v1.request import RequestStatus

from segreuse_extras.healing.alarm import Alarm
from segreuse_extras.healing.options import HealingServer
from segreuse_extras.healing.turns import Turn, Unhealed
from vllm_segreuse.engine.priorities import LAST_PRIORITY
from vllm_segreuse.scheduling.arrival import has_adapter
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Ending, Feature, OwnRequests
from vllm_segreuse.scheduling.making import Making

if TYPE_CHECKING:
    from vllm.v1.request import Request


class _HealedPart(NamedTuple):
    """Blocks `[first, last)` of a turn, which a request computes."""

    request_id: str
    turn: Turn
    first: int
    last: int


class Healing(Feature, OwnRequests):
    """Of one engine.

    Args:
        core: of the engine.
        most: tokens of a part.
        after_s: seconds of idle time before the first part.
        clock: seconds.
    """

    name = "healing"

    def __init__(self, core: Core, most: int, after_s: float, clock: Callable[[], float]) -> None:
        self._core = core
        self._most = most
        self._after_s = after_s
        self._clock = clock
        self._alarm = Alarm(clock)
        self._begins_s = clock() + after_s  # unless somebody needs the engine before
        self.turns = Unhealed(lambda outcome: core.stats.inc("healings_total", outcome=outcome))
        self._part: _HealedPart | None = None
        self._number = 0

    def allocated(self, admitted: Admitted) -> None:
        """A turn that goes on needs no healing."""
        self.turns.goes_on(admitted.request)

    def finished(self, ending: Ending) -> None:
        """A turn has ended that holds moved text; or a part has."""
        request, tracked = ending.request, ending.tracked
        if self._part is not None and request.request_id == self._part.request_id:
            self._ended(ending.is_complete)
            return
        self._begins_anew()
        if tracked is None or tracked.donor_depth < 0 or not _is_answered(ending):
            return
        if tracked.is_required or tracked.names_documents:
            return  # what they hold is not what vLLM computes of their tokens
        if request.mm_features or request.resumable:
            return
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        whole = computed // self._core.block_size
        if whole * self._core.block_size > tracked.exact_ends[1]:
            self.turns.add(Turn(request, whole))

    def _ended(self, is_complete: bool) -> None:
        assert self._part is not None
        (_, turn, first, last), self._part = self._part, None
        if is_complete:
            tokens = (last - first) * self._core.block_size
            self._core.stats.inc("healed_tokens_total", tokens)
        # Whose blocks are gone as soon as they are computed would be computed for ever.
        is_in_vain = not is_complete or self._first_missing(turn) <= first
        if is_in_vain and self.turns.next is turn:
            self.turns.end("forgotten")

    def to_add(self, running: int, waiting: int, is_paused: bool) -> Iterable[Request]:
        """The next part, where nobody needs the engine, nor has for some time."""
        if running + waiting > (self._part is not None):
            self._begins_anew()
        elif not self._has_rested():
            if len(self.turns) > 0 and self.wake is not None:
                self._alarm.set(self._begins_s, self.wake)
        elif self._part is None and not is_paused:
            while (turn := self.turns.next) is not None:
                part = self._next_part(turn)
                if part is not None:
                    yield part
                    return

    def _begins_anew(self) -> None:
        self._begins_s = self._clock() + self._after_s

    def _has_rested(self) -> bool:
        return self._clock() >= self._begins_s

    def _next_part(self, turn: Turn) -> Request | None:
        """What is to be computed of a turn next; None: it has ended."""
        first, size = self._first_missing(turn), self._core.block_size
        if first == turn.num_blocks:
            self.turns.end("healed")
            return None
        last = min(turn.num_blocks, first + max(1, self._most // size))
        has_room = self._core.has_room(last * size + 1)  # with the token that it generates
        if not (has_room and has_adapter(turn.request)):
            self.turns.end("forgotten")
            return None
        part = self._request(turn.request, last * size)
        self._part = _HealedPart(part.request_id, turn, first, last)
        return part

    def _first_missing(self, turn: Turn) -> int:
        """Blocks of a turn that vLLM finds as its prefix."""
        found = self._core.pool.resident_blocks(turn.request, 0, turn.num_blocks)
        holes = np.flatnonzero(found < 0)
        return int(holes[0]) if holes.size else turn.num_blocks

    def has_pending_work(self) -> bool:
        """Whether turns wait, and the engine has been idle for long enough. Until then it sleeps,
        if it can be woken."""
        rests = self.wake is not None and not self._has_rested()
        return len(self.turns) > 0 and not rests and not self.is_paused()

    def to_abort(self) -> Iterable[str]:
        """The part that runs, if there is one."""
        self.turns.reset()
        return () if self._part is None else (self._part.request_id,)

    def _request(self, of: Request, num_tokens: int) -> Request:
        """The beginning of a request, for vLLM alone: without extra keys, after all others."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._number += 1
        return Request(
            request_id=f"segreuse-heal-{self._number}",
            prompt_token_ids=of.all_token_ids[:num_tokens],
            sampling_params=SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            lora_request=of.lora_request,
            cache_salt=of.cache_salt,
            priority=LAST_PRIORITY,
            block_hasher=of._block_hasher,
        )


def _is_answered(ending: Ending) -> bool:
    """Whether somebody may go on with the answer. One that ends at a stop string is aborted by
    vLLM's API server, which is the only one that looks for these."""
    params = ending.request.sampling_params
    was_aborted = ending.request.status == RequestStatus.FINISHED_ABORTED
    return ending.is_complete or bool(was_aborted and params is not None and params.stop)


def start(making: Making) -> Healing | None:
    """That of an engine; None: it does not heal."""
    options = HealingServer.of(making.core.config)
    if not options.heal_tokens:
        return None
    return Healing(making.core, options.heal_tokens, options.heal_after_s, monotonic)
