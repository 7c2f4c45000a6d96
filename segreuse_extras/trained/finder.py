# SPDX-License-Identifier: Apache-2.0
"""Documents of a model that was trained on documents computed alone (`layout.py`).

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

from segreuse_extras.copies import rows
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.matcher import NOTHING, Matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import IntArray, Pieces


class IsolatedDocument(NamedTuple):
    """A document of a prompt.

    Attributes:
        start, stop: its tokens in the prompt.
        padded: its tokens as they are computed alone (`layout.padded`).
        resident: its blocks, int32, in order; None unless all of them are resident and known in
            the request's namespace.
    """

    start: int
    stop: int
    padded: tuple[int, ...]
    resident: Callable[[], IntArray | None]


class IsolatedFinder(Finder):
    """The documents of one request; nothing is remembered, since blocks come and go.

    Args:
        documents: of the prompt, in order.
        block_size: tokens per block.
    """

    is_exact = True

    def __init__(self, documents: Sequence[IsolatedDocument], block_size: int) -> None:
        self._documents = documents
        self._block_size = block_size

    def behind(self, start: int) -> list[IsolatedDocument]:
        """Documents that end behind `start`."""
        return [document for document in self._documents if document.stop > start]

    def missing(self, start: int) -> list[IsolatedDocument]:
        """Those that are not there."""
        return [document for document in self.behind(start) if document.resident() is None]

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        found: list[IntArray] = []
        for document in self.behind(start):
            blocks = document.resident()
            if blocks is not None:
                first = max(0, start - document.start)
                positions = np.arange(first, document.stop - document.start, dtype=np.int32)
                found.append(rows(blocks, positions, document.start + first, self._block_size))
        if not found:
            return NOTHING
        pieces = Pieces.from_table(np.concatenate(found))
        return Matches(pieces, pieces.num_tokens, len(found), max_depth=0)
