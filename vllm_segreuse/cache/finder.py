# SPDX-License-Identifier: Apache-2.0
"""How reusable KV is found for a prompt. Each way of searching is a `Finder`."""

from __future__ import annotations

from typing import Protocol

from vllm_segreuse.cache.contexts import compared
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import Matches, find_matches
from vllm_segreuse.cache.prompt import Memo, Prompt
from vllm_segreuse.cache.second_tier import keeping
from vllm_segreuse.plan import NO_HALO, BoolArray, Halo


class Finder(Protocol):
    """One per engine and way of searching; requests choose one by their policy.

    Unless it says otherwise, a finder prepares and remembers nothing, and plans end at `stop`.
    """

    @property
    def is_exact(self) -> bool:
        """Whether what is found is the KV of the prompt's own prefix, to the last bit."""

    @property
    def halo(self) -> Halo:
        """What is asked of the similar segments that it finds."""
        return NO_HALO

    def least_tokens(self, block_size: int) -> int:
        """Fewer tokens are not searched for."""
        return block_size

    def prepare(self, prompt: Prompt) -> None:
        """A request arrived. Runs outside of `schedule()`, so what takes time belongs here."""
        return  # the method is no abstract one

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        """What `find` would return, if that is known without another search."""
        return None

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        """Search for KV of the positions `[start, stop)`. Runs within `schedule()`.

        Args:
            start: end of vLLM's own prefix hit.
            stop: the last token of the prompt, which vLLM computes.
        """

    def plan_stop(self, matches: Matches, start: int, stop: int) -> int:
        """Where a plan of these matches for `[start, stop)` ends, at most at `stop`; the rest is
        vLLM's own work."""
        return stop

    def part(
        self, prompt: Prompt, matches: Matches, kept: BoolArray, start: int, stop: int
    ) -> Matches | None:
        """What can be reused of matches where some of their pieces cannot; None: nothing.

        Args:
            matches: for `[start, stop)`, perhaps with what is restored in front of them.
            kept: bool `[pieces]`: those that can.
        """
        return keeping(matches, kept)


class ContentFinder(Finder):
    """Segments at any offset, by their tokens; see `matcher.py`.

    Args:
        index: where they are looked up.
        max_depth: deepest provenance of a donor.
    """

    is_exact = False

    def __init__(self, index: SegmentIndex, max_depth: int) -> None:
        self._index = index
        self._max_depth = max_depth

    def prepare(self, prompt: Prompt) -> None:
        prompt.hashes(self._index.block_size)

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        memo = prompt.memo
        return memo.matches if memo is not None and memo.key == self._key(start, stop) else None

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        hashes = prompt.hashes(self._index.block_size)
        matches = find_matches(
            self._index, prompt.namespace, prompt.tokens, hashes, start, stop, self._max_depth
        )
        matches = compared(matches, self._index, prompt)
        if self._index.position_offsets is not None:
            turned = matches.pieces.turned(self._index.position_offsets, prompt.images)
            matches = matches._replace(pieces=turned)
        prompt.memo = Memo(self._key(start, stop), matches)
        return matches

    def _key(self, start: int, stop: int) -> tuple[int, int, int]:
        return start, stop, self._index.version
