# SPDX-License-Identifier: Apache-2.0
"""Documents of a model that was trained on documents computed alone (`documents/layout.py`).

    computed alone   | d d d d | d d d d | d d e e | e   padded with end tokens
    prompt           t t t d d d d d d d d d d l l q
    pieces                 -------------------           all of the document, from position 0

Only KV that was computed alone is right for such a model, so nothing is found by content: the
blocks are those that vLLM has named for the document and its padding as a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import IntArray, Pieces


class IsolatedDocument(NamedTuple):
    """A document of a prompt.

    Attributes:
        start, stop: its tokens in the prompt.
        padded: its tokens as they are computed alone (`documents.layout.padded`).
        resident: its blocks, int32, in order; None unless all of them are resident and known in
            the request's namespace.
    """

    start: int
    stop: int
    padded: tuple[int, ...]
    resident: Callable[[], IntArray | None]


class IsolatedFinder:
    """The documents of one request; nothing is remembered, since blocks come and go.

    Args:
        documents: of the prompt, in order.
        block_size: tokens per block.
    """

    is_exact = True

    def __init__(self, documents: Sequence[IsolatedDocument], block_size: int) -> None:
        self._documents = documents
        self._block_size = block_size

    def prepare(self, prompt: Prompt) -> None:
        pass

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        return None

    def behind(self, start: int) -> list[IsolatedDocument]:
        """Documents that end behind `start`."""
        return [document for document in self._documents if document.stop > start]

    def missing(self, start: int) -> list[IsolatedDocument]:
        """Those that are not there."""
        return [document for document in self.behind(start) if document.resident() is None]

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        rows: list[IntArray] = []
        for document in self._documents:
            blocks = document.resident() if document.stop > start else None
            if blocks is not None:
                rows.append(self._rows(document, blocks, start))
        table = np.concatenate(rows) if rows else np.zeros((0, 5), np.int32)
        return Matches(Pieces.from_table(table), int(table[:, 1].sum()), len(rows), max_depth=0)

    def plan_stop(self, matches: Matches, stop: int) -> int:
        return stop

    def _rows(self, document: IsolatedDocument, blocks: IntArray, start: int) -> IntArray:
        """Pieces of a document from `start` on, one for each block."""
        size = self._block_size
        length = document.stop - document.start
        first = max(0, start - document.start)
        begins = np.arange(first // size, -(-length // size)) * size
        position = np.maximum(begins, first)
        count = np.minimum(begins + size, length) - position
        block = blocks[begins // size]
        columns = (document.start + position, count, block, position - begins, position)
        return np.stack(columns, axis=1).astype(np.int32)
