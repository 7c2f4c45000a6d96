# SPDX-License-Identifier: Apache-2.0
"""A finder around another one."""

from __future__ import annotations

from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import BoolArray, Halo


class FinderAround(Finder):
    """Finds more than another finder, to which it leaves what only that one knows.

    Args:
        finder: the other one.
    """

    is_exact = False

    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    @property
    def halo(self) -> Halo:
        return self._finder.halo

    def prepare(self, prompt: Prompt) -> None:
        self._finder.prepare(prompt)

    def least_tokens(self, block_size: int) -> int:
        return self._finder.least_tokens(block_size)

    def plan_stop(self, matches: Matches, start: int, stop: int) -> int:
        return self._finder.plan_stop(matches, start, stop)

    def part(
        self, prompt: Prompt, matches: Matches, kept: BoolArray, start: int, stop: int
    ) -> Matches | None:
        return self._finder.part(prompt, matches, kept, start, stop)
