# SPDX-License-Identifier: Apache-2.0
"""Equal prompts at once: one is carried out, and the others take its KV as it is.

the first    | prefix | moved, computed  . . . . . . |part|      its whole blocks, and part of one
the others   | prefix | the same blocks              |copy| 1    they compute the last token

vLLM does so by its prefix cache, which finds exact blocks only: `n` sequences of a request, equal
prompts of a list, retries and rollouts would each move and compute the same text. Here a request
waits while an equal one is computed, and takes its blocks then, as a prefix hit is taken. The last
block, which each goes on to fill, is copied up to the last token. Where the first one ends in the
step that computes its prompt, as one of a single token does, those that wait take its whole blocks,
unless vLLM has given them to others by then, and compute what is behind.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.request import RequestStatus

from segreuse_extras.coalescing.ended import LeftByEnded
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import BoolArray, Pieces, Recipe, ReusePlan, Segments
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Admitted, Arriving, Ending, Feature
from vllm_segreuse.scheduling.making import Making
from vllm_segreuse.scheduling.tracked import (
    NOTHING_LEFT,
    FindLeftBehind,
    LeftBehind,
    Method,
    TrackedRequest,
    Use,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

_HOLDING = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)


_Key = tuple[tuple[int, bytes, bytes], PolicyOptions]
"""What equal requests have in common: the whole prompt (`Prompt.whole`), and their options."""


class Coalescing(Feature):
    """Of one engine.

    Args:
        core: of the engine.
    """

    name = "coalescing"

    def __init__(self, core: Core) -> None:
        self._core = core
        self._keys: dict[str, _Key] = {}
        # Those that hold the KV of a prompt, or compute it, in the order in which they came.
        self._holders: dict[_Key, dict[str, Request]] = {}
        self._too_early: set[str] = set()  # by the lookups of this step
        self._waiting: dict[str, _Key] = {}  # who was too early once, and runs not yet
        self._ended = LeftByEnded(core.block_size)
        self.listeners = (self._ended,)

    def admit(self, arriving: Arriving) -> None:
        """Let it take what an equal request has computed."""
        request, tracked = arriving.request, arriving.tracked
        if tracked.mode is not Use.REUSE or tracked.names_documents:
            return
        if request.resumable:
            return  # it is another prompt once its next part has come
        if not arriving.is_text or not arriving.takes_turns or arriving.options.policy == "exact":
            return
        whole = tracked.prompt.whole(self._core.block_size)
        if not whole[1]:
            return  # it has no full block
        self._keys[request.request_id] = key = whole, arriving.options
        find: FindLeftBehind = functools.partial(self._find, key, tracked)
        finders = (find, *tracked.method.left_behind)
        tracked.method = replace(tracked.method, left_behind=finders)

    def waits(self, request: Request, tracked: TrackedRequest | None, num_hit_tokens: int) -> bool:
        """Whether it would have taken of an equal request that is computed just now. Nobody is
        asked for what they take while nothing is reused (`ExactNames`), so nobody waits then."""
        return request.request_id in self._too_early

    def allocated(self, admitted: Admitted) -> None:
        """What holds moved text may be taken; the others hold exact blocks, which vLLM finds."""
        request = admitted.request
        self._waits_no_more(request.request_id)
        key = self._keys.get(request.request_id)
        if key is None or request.num_tokens > request.num_prompt_tokens:
            return
        if admitted.tracked.donor_depth >= 0:
            self._holders.setdefault(key, {})[request.request_id] = request

    def finished(self, ending: Ending) -> None:
        """Its blocks are not its own any more."""
        request_id = ending.request.request_id
        key = self._keys.get(request_id)
        if key is not None and request_id in self._holders.get(key, ()):
            self._leave(key, ending)
        self.called_back(request_id)
        self._waits_no_more(request_id)
        self._keys.pop(request_id, None)

    def _leave(self, key: _Key, ending: Ending) -> None:
        """What it has computed is left to those that wait for it."""
        request, tracked = ending.request, ending.tracked
        count = request.num_prompt_tokens // self._core.block_size
        blocks = ending.block_ids[:count]
        is_there = len(blocks) == count and request.num_computed_tokens >= request.num_prompt_tokens
        is_waited_for = ending.is_complete and key in self._waiting.values()
        if not (is_there and is_waited_for) or tracked is None:
            return
        if all(self._core.pool.blocks[block].block_hash is not None for block in blocks):
            self._ended.keep(key, blocks, tracked.donor_depth)

    def _waits_no_more(self, request_id: str) -> None:
        key = self._waiting.pop(request_id, None)
        if key is not None and key not in self._waiting.values():
            self._ended.drop(key)

    def called_back(self, request_id: str) -> None:
        """It loses its blocks."""
        key = self._keys.get(request_id)
        if key in self._holders:
            self._drop(key, request_id)

    def end_step(self, plans: Sequence[ReusePlan], runs_model: bool) -> None:
        """What was looked up says nothing of a later step: admission may have been closed before
        anybody asked who waits."""
        self._too_early.clear()

    @property
    def num_known(self) -> int:
        """Requests that may take something, and those that others take something of."""
        others = len(self._waiting) + len(self._ended)
        return len(self._keys) + sum(map(len, self._holders.values())) + others

    def _drop(self, key: _Key, request_id: str) -> None:
        self._holders[key].pop(request_id, None)
        if not self._holders[key]:
            del self._holders[key]

    def _live(self, key: _Key) -> list[Request]:
        """Requests that hold their blocks: who was preempted does not."""
        holders = self._holders.get(key, {})
        for name in [name for name, it in holders.items() if it.status not in _HOLDING]:
            self._drop(key, name)
        return [*holders.values()]

    def _find(
        self, key: _Key, tracked: TrackedRequest, prompt: Prompt, start: int, stop: int
    ) -> LeftBehind:
        """What a request takes of an equal one; see `FindLeftBehind`."""
        self._too_early.discard(tracked.request_id)
        holders = self._live(key)
        # Who was preempted has generated tokens, too.
        if holders and stop != holders[0].num_prompt_tokens - 1:
            return NOTHING_LEFT
        holder = next(filter(_is_computed, holders), None)
        if holder is None:
            waits = tracked.request_id in self._waiting
            left = self._ended.found(key, start, stop) if waits else NOTHING_LEFT
            if holders and not left.num_tokens:
                self._too_early.add(tracked.request_id)
                self._waiting[tracked.request_id] = key
            return left
        size, depth = self._core.block_size, self._core.requests[holder.request_id].donor_depth
        blocks = self._core.group.of(self._core.manager.get_block_ids(holder.request_id))
        last = stop // size
        left = LeftBehind(start, last * size, [*blocks[start // size : last]], depth)
        if left.stop == stop:
            return left
        part = Pieces.from_table([(left.stop, stop - left.stop, blocks[last], 0, left.stop)])
        matches = Matches.of(replace(part, in_context=np.ones(1, np.bool_)), depth)
        return left._replace(behind=Method(tracked.method.policy, _HeldPart(matches), _as_it_is))


def _is_computed(request: Request) -> bool:
    """Whether an earlier step has computed its prompt. vLLM counts what a spread plan supplies as
    computed while it is set aside for that."""
    runs = request.status == RequestStatus.RUNNING
    return bool(runs and request.num_computed_tokens >= request.num_prompt_tokens)


class _HeldPart(Finder):
    """Tokens of a block that an equal prompt holds.

    Args:
        matches: that copy them.
    """

    is_exact = False

    def __init__(self, matches: Matches) -> None:
        self._matches = matches

    def least_tokens(self, block_size: int) -> int:
        return 1

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches:
        return self._matches

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        return self._matches


def _as_it_is(reused: BoolArray, segments: Segments) -> Recipe:
    """Nothing of it is computed again."""
    return Recipe.without_choice(np.logical_not(reused))


def start(making: Making) -> Coalescing | None:
    """That of an engine; None: layers with a window, or a state, do not keep what equal prompts
    would take."""
    return Coalescing(making.core) if making.core.group.is_alone else None
