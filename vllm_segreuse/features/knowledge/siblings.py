# SPDX-License-Identifier: Apache-2.0
"""What the documents of a base are computed behind: the beginnings of two others.

    base                    A    B    C    D    E ...     in the order of addition
    lead documents          A    B    C
    computed behind        B C  A C  A B  A B  A B

A document that was computed by itself, and is then moved behind others, answers much worse than one
that was computed behind others of its kind. The lead documents are the first three of a base that
are long enough and differ. Each document is computed behind the first two that are not its own
text, so that a base has four contexts at most, and nearly all of its documents share one: vLLM's
prefix cache computes it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np

from vllm_segreuse.features.knowledge.catalogue import CatalogueDocument
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.store import Tokens, digest_of

NUM_SIBLINGS = 2
"""Others that a document is computed behind."""

SIBLING_TOKENS = 512
"""Of each of them, its first ones."""

MIN_TOKENS = 32
"""A shorter text shows nothing of what documents of its base are like."""


def lead_documents(documents: Iterable[CatalogueDocument]) -> list[CatalogueDocument]:
    """Of the documents of a base, in the order of addition, those that others are computed behind:
    one more than a document needs, since none is computed behind itself."""
    leads: dict[bytes, CatalogueDocument] = {}
    for document in documents:
        if document.fault is None and document.num_tokens >= MIN_TOKENS:
            leads.setdefault(document.text, document)
        if len(leads) > NUM_SIBLINGS:
            break
    return [*leads.values()]


class Context(NamedTuple):
    """Tokens before a document, and their digest."""

    tokens: Tokens
    digest: bytes


class BaseContexts:
    """The contexts of a base.

    Args:
        base: tokens before each of its documents.
        leads: beginnings of its lead documents, by digest of their text; none: the documents are
            computed behind `base` only.
        shape: how documents are cut. Half of the longest prompt is left to them, and siblings end
            with a whole block.
    """

    def __init__(self, base: Tokens, leads: Mapping[bytes, Tokens], shape: Shape) -> None:
        self._base = base
        self._leads = leads
        self._block_size = shape.block_size
        room = (shape.max_prompt_tokens // 2 - len(base)) // NUM_SIBLINGS
        self._length = min(SIBLING_TOKENS, room) if room >= MIN_TOKENS else 0
        self._of_lead = {text: self._behind(text) for text in leads}
        self._of_others = self._behind(None)

    def of(self, text: bytes) -> Context:
        """What a document with this text is computed behind."""
        return self._of_lead.get(text, self._of_others)

    def _behind(self, text: bytes | None) -> Context:
        others = (tokens for lead, tokens in self._leads.items() if lead != text)
        siblings = (tokens[: self._length] for tokens in islice(others, NUM_SIBLINGS))
        tokens = np.concatenate((self._base, *siblings))
        # Whole blocks: the prefix cache has all of them, and the document takes no block more.
        whole = len(tokens) // self._block_size * self._block_size
        tokens = tokens[: max(whole, len(self._base))]
        return Context(tokens, digest_of(tokens))
