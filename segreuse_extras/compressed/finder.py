# SPDX-License-Identifier: Apache-2.0
"""Compressed documents: some of a document's tokens, with the KV that they had among all of them.

    document         a b c d e f g h i j          computed behind its context
    kept               b     e f     i            moved to positions 0, 1, 2, ... : a frozen entry
    prompt           x x x b e f i y y            the request names the document
    pieces                 -------                from the entry of this document, and no other

Nothing finds a compressed document by its text. Its blocks are in no index, and as a rule have no
exact names. Where a model was trained for it, anchors are what is kept
(`segreuse_extras/trained/anchors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from segreuse_extras.copies import outside, rows, within
from segreuse_extras.finder import FinderAround
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import NOTHING, Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.features.knowledge.frozen import FrozenPart
from vllm_segreuse.features.knowledge.places import places
from vllm_segreuse.plan import BoolArray, IntArray, Pieces

Held = Callable[[str], Sequence[FrozenPart] | None]
"""Parts of an entry in the request's namespace; None: not all of it is there."""


class CopyFinder(Finder):
    """Tokens of another sequence become the first ones of a prompt.

    Args:
        resident: blocks of that sequence, int32, in order; -1 for one that is not there.
        positions: int32, of the tokens in that sequence, ascending.
        block_size: tokens per block.
    """

    is_exact = False

    def __init__(
        self, resident: Callable[[], IntArray], positions: IntArray, block_size: int
    ) -> None:
        self._resident = resident
        self._positions = positions
        self._block_size = block_size

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        """All of the tokens, or none."""
        blocks = self._resident()
        needed = np.unique(self._positions // self._block_size)
        if start or needed[-1] >= len(blocks) or (blocks[needed] < 0).any():
            return NOTHING
        table = rows(blocks, self._positions, 0, self._block_size)
        return Matches.of(Pieces.from_table(table))


class PartsFinder(Finder):
    """What was kept of a document so far stands behind a prompt's first token.

    Args:
        parts: of it; None: there are none.
        num_tokens: of all parts.
        block_size: tokens per block.
    """

    is_exact = False

    def __init__(
        self, parts: Callable[[], Sequence[FrozenPart] | None], num_tokens: int, block_size: int
    ) -> None:
        self._parts = parts
        self._num_tokens = num_tokens
        self._block_size = block_size

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        """All of them, or none."""
        parts = self._parts() or ()
        if start or not parts or len(_tokens(parts)) != self._num_tokens:
            return NOTHING
        table = np.concatenate(_document_rows(1, parts, self._block_size))
        return Matches.of(Pieces.from_table(table))


class NamedFinder(FinderAround):
    """The documents that a request names, and around them what another finder finds.

    Args:
        others: finds the rest.
        names: entries, in the order in which they stand in the prompt.
        held: looks an entry up.
        block_size: tokens per block.
        least: fewer tokens of the rest alone are not reused. Documents are, however short they are.
    """

    def __init__(
        self, others: Finder, names: Sequence[str], held: Held, block_size: int, least: int = 1
    ) -> None:
        super().__init__(others)
        self._names = names
        self._held = held
        self._block_size = block_size
        self._least = least

    def least_tokens(self, block_size: int) -> int:
        return 1

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        found = self._finder.remembered(prompt, start, stop)
        return None if found is None else self._with_documents(found, prompt, start, stop)

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        found = self._finder.find(prompt, start, stop)
        return self._with_documents(found, prompt, start, stop)

    def first_place(self, prompt: Prompt) -> int:
        """Where the first document begins; 0 where one is not there, and may be anywhere."""
        return min((place for place, _ in self._documents(prompt)), default=0)

    def part(
        self, prompt: Prompt, matches: Matches, kept: BoolArray, start: int, stop: int
    ) -> Matches | None:
        """A document is no text: all of it is reused, or nothing at all."""
        lost = matches.pieces.where(~kept)
        spans = [(at, at + len(_tokens(parts))) for at, parts in self._documents(prompt)]
        if not spans or len(outside(lost, spans)) < len(lost):
            return None
        return super().part(prompt, matches, kept, start, stop)

    def _documents(self, prompt: Prompt) -> list[tuple[int, Sequence[FrozenPart]]]:
        """Where each of them begins, and its parts; none at all unless every one is there."""
        found = [self._held(name) for name in self._names]
        warm = [parts for parts in found if parts is not None]
        if len(warm) < len(found):
            return []
        where = places(prompt.tokens, (_tokens(parts) for parts in warm))
        if None in where:
            return []
        return [
            (place, parts) for place, parts in zip(where, warm, strict=True) if place is not None
        ]

    def _with_documents(self, found: Matches, prompt: Prompt, start: int, stop: int) -> Matches:
        documents = self._documents(prompt)
        if not documents:
            return found if found.num_tokens >= self._least else NOTHING
        spans = [(place, place + len(_tokens(parts))) for place, parts in documents]
        own = [
            row
            for place, parts in documents
            for row in _document_rows(place, parts, self._block_size)
        ]
        table = within(np.concatenate(own), start, stop)
        around = outside(found.pieces, spans)
        pieces = around.merged(Pieces.from_table(table)) if len(table) else around
        return Matches.of(pieces, found.max_depth)


def _document_rows(place: int, parts: Sequence[FrozenPart], block_size: int) -> list[IntArray]:
    found = []
    for part in parts:
        assert part.tokens is not None
        before = [-1] * (part.first // block_size)
        blocks = np.asarray(before + part.block_ids, np.int32)
        positions = part.first + np.arange(len(part.tokens))
        found.append(rows(blocks, positions, place, block_size))
        place += len(part.tokens)
    return found


def _tokens(parts: Sequence[FrozenPart]) -> IntArray:
    return np.concatenate([part.tokens for part in parts if part.tokens is not None])
