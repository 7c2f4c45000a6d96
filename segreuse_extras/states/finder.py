# SPDX-License-Identifier: Apache-2.0
"""Finds segments whose KV and whose map are there, each as a whole."""

from __future__ import annotations

import numpy as np

from segreuse_extras.finder import FinderAround
from segreuse_extras.states.catalogue import MapCatalogue
from segreuse_extras.states.messages import Placed
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import NOTHING, Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import BoolArray, Pieces


class WholeSegments(FinderAround):
    """What another finder finds of whole segments. One per request.

    Args:
        finder: the other one, of KV of the attention layers.
        catalogue: of maps.
        namespace: digest of the request's.
        shortest: shorter runs get no map: each takes as much as the KV of some thousand tokens.

    Attributes:
        taken: segments that the last search returned.
        start: where that began.
        missed: runs `[first, stop)` of one sequence each whose KV the last search found, and no
            map.
    """

    def __init__(
        self, finder: Finder, catalogue: MapCatalogue, namespace: int, shortest: int
    ) -> None:
        super().__init__(finder)
        self._catalogue = catalogue
        self._namespace = namespace
        self._shortest = shortest
        self.taken: list[Placed] = []
        self.start = 0
        self.missed: list[tuple[int, int]] = []

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        found = self._finder.remembered(prompt, start, stop)
        return None if found is None else self._whole(prompt, found, start)

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        return self._whole(prompt, self._finder.find(prompt, start, stop), start)

    def part(
        self, prompt: Prompt, matches: Matches, kept: BoolArray, start: int, stop: int
    ) -> Matches | None:
        left = self._finder.part(prompt, matches, kept, start, stop)
        return None if left is None else self._whole(prompt, left, start)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """`taken`, counted from `start`."""
        return [(it.first - self.start, it.stop - self.start) for it in self.taken]

    def _whole(self, prompt: Prompt, found: Matches, start: int) -> Matches:
        self.start = start
        pieces, tokens = found.pieces, prompt.tokens
        covered = pieces.reused(0, len(tokens))
        self.taken = self._catalogue.find(self._namespace, tokens, covered)
        self.missed = _runs_without(pieces, self.taken, self._shortest)
        if not self.taken:
            return NOTHING
        parts = [pieces.up_to(it.stop).behind(it.first) for it in self.taken]
        together = parts[0]
        for part in parts[1:]:
            together = together.merged(part)
        return Matches.of(together, found.max_depth)


def _runs_without(pieces: Pieces, taken: list[Placed], shortest: int) -> list[tuple[int, int]]:
    """Runs of one donor's sequence, without what is taken, that are long enough for a map."""
    if not len(pieces):
        return []
    begins = np.flatnonzero(pieces.starts)
    firsts = pieces.destination[begins]
    lengths = np.add.reduceat(pieces.length, begins)
    runs = list[tuple[int, int]]()
    for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
        at, stop = first, first + length
        for it in taken:
            if it.stop > at and it.first < stop:
                runs.append((at, it.first))
                at = it.stop
        runs.append((at, stop))
    return [(first, stop) for first, stop in runs if stop - first >= shortest]
