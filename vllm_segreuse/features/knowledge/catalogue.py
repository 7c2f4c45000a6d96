# SPDX-License-Identifier: Apache-2.0
"""What is in the knowledge bases of one engine, without what is warm of it.

Documents with the same text, in the same context and under the same extra key, share one *entry*:
it is entries that are computed, frozen and counted. Nothing here waits, asks or writes.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from vllm_segreuse.features.knowledge.chunks import Shape, num_blocks
from vllm_segreuse.features.knowledge.compression import CompressionSettings
from vllm_segreuse.features.knowledge.errors import NotFoundError
from vllm_segreuse.features.knowledge.store import BaseRecord, DocumentRecord, Tokens, digest_of

_ITEM_BYTES = 1024
"""Of a document or base itself: its objects, its names, its places in tables."""

_OBJECT_BYTES = 24
"""Of what a byte of JSON can become: lists of empty lists are the worst."""


@dataclass
class CatalogueDocument:
    """A document without its tokens; those stay in the manifest.

    Attributes:
        text: digest of its tokens.
        context: digest of the tokens before it while it is computed.
        num_context: how many these are.
        metadata: as JSON, which takes the least room.
        fault: why it cannot be computed.
        compression: None: all of its KV is kept.
    """

    id: str
    entry: str
    num_tokens: int
    text: bytes
    context: bytes
    num_context: int
    metadata: str
    fault: str | None = None
    compression: CompressionSettings | None = None

    @classmethod
    def of(cls, record: DocumentRecord, fault: str | None = None) -> Self:
        """A document of the manifest as the catalogue keeps it."""
        return cls(
            *(record.id, record.entry, len(record.tokens), digest_of(record.tokens)),
            *(digest_of(record.context), len(record.context), json.dumps(record.metadata), fault),
            record.compression,
        )

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory."""
        return _ITEM_BYTES + 4 * (len(self.id) + len(self.metadata))


@dataclass
class CatalogueBase:
    """A base.

    Attributes:
        context: tokens before each of its documents.
        documents: by id, in the order in which they were added.
        leads: beginnings of its lead documents by digest of their text (`siblings.py`).
    """

    record: BaseRecord
    context: Tokens
    documents: dict[str, CatalogueDocument] = field(default_factory=dict)
    leads: dict[bytes, Tokens] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory, without its documents."""
        metadata = _OBJECT_BYTES * len(json.dumps(self.record.metadata))
        return _ITEM_BYTES + 4 * len(self.record.preamble or "") + self.context.nbytes + metadata


class Blocks(NamedTuple):
    """Blocks that entries take.

    Attributes:
        warm: when they are warm.
        gpu_only: those of them that the second tier does not take.
        meanwhile: besides, at most, until they are warm; in GPU memory, too.
    """

    warm: int
    gpu_only: int
    meanwhile: int


@dataclass
class Entry:
    """What equal documents of one namespace share.

    Attributes:
        blocks: that it takes.
        owners: (base, id) of these documents.
    """

    blocks: Blocks
    owners: set[tuple[str, str]] = field(default_factory=set)
    hits: int = 0
    last_used: float | None = None


class Catalogue:
    """Bases by name, and the entries of all their documents.

    Args:
        shape: how documents are cut.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.bases: dict[str, CatalogueBase] = {}
        self.entries: dict[str, Entry] = {}

    def base(self, name: str) -> CatalogueBase:
        """The base of this name.

        Raises:
            NotFoundError: there is none.
        """
        if name not in self.bases:
            raise NotFoundError(f"there is no knowledge base {name!r}")
        return self.bases[name]

    def document(self, base: CatalogueBase, document_id: str) -> CatalogueDocument:
        """The document of this id.

        Raises:
            NotFoundError: there is none.
        """
        if document_id not in base.documents:
            raise NotFoundError(
                f"there is no document {document_id!r} in knowledge base {base.record.name!r}"
            )
        return base.documents[document_id]

    def documents(self) -> list[CatalogueDocument]:
        """All documents of all bases."""
        return [d for base in self.bases.values() for d in base.documents.values()]

    @property
    def num_bytes(self) -> int:
        """About what all of it takes in memory."""
        documents = sum(document.num_bytes for document in self.documents())
        return documents + sum(base.num_bytes for base in self.bases.values())

    def num_more_bytes(self, base: CatalogueBase, documents: Iterable[CatalogueDocument]) -> int:
        """How many more it takes, once these documents are in the base."""
        more = 0
        for document in documents:
            before = base.documents.get(document.id)
            more += document.num_bytes - (before.num_bytes if before else 0)
        return more

    def put(self, base: CatalogueBase, document: CatalogueDocument) -> None:
        """Add a document, or replace the one with its id. A text that moved keeps its hits."""
        before = base.documents.get(document.id)
        place(base.documents, document)
        if document.fault is not None:
            return
        entry = self.entries.get(document.entry)
        if entry is None:
            entry = self.entries[document.entry] = Entry(self._blocks(document))
            if before is not None and before.text == document.text:
                moved = self.entries.get(before.entry, entry)
                entry.hits, entry.last_used = moved.hits, moved.last_used
        entry.owners.add((base.record.name, document.id))

    def disown(self, base: str, documents: Iterable[CatalogueDocument]) -> list[str]:
        """Documents have left their base; returns the entries that nobody else has."""
        gone = []
        for document in documents:
            entry = self.entries.get(document.entry)
            current = self.bases[base].documents.get(document.id) if base in self.bases else None
            if entry is None or (
                current is not None and current.fault is None and current.entry == document.entry
            ):
                continue
            entry.owners.discard((base, document.id))
            if not entry.owners:
                del self.entries[document.entry]
                gone.append(document.entry)
        return gone

    def num_blocks(self) -> int:
        """Blocks that all documents take together when all are warm."""
        return sum(entry.blocks.warm for entry in self.entries.values())

    def num_blocks_meanwhile(self, at_once: int) -> int:
        """Blocks that all documents take besides, at most, while so many are computed at once."""
        return _meanwhile((entry.blocks for entry in self.entries.values()), at_once)

    def num_blocks_with(
        self, base: CatalogueBase, documents: Sequence[CatalogueDocument], at_once: int
    ) -> Blocks:
        """What all documents take together, once these are in the base."""
        blocks = {name: entry.blocks for name, entry in self.entries.items()}
        leaving: dict[str, set[tuple[str, str]]] = {}
        for document in documents:
            before = base.documents.get(document.id)
            if before is not None and before.fault is None:
                leaving.setdefault(before.entry, set()).add((base.record.name, document.id))
        for name, owners in leaving.items():
            if self.entries[name].owners <= owners:
                blocks.pop(name, None)
        for document in documents:
            if document.fault is None:
                blocks[document.entry] = self._blocks(document)
        warm = sum(each.warm for each in blocks.values())
        gpu_only = sum(each.gpu_only for each in blocks.values())
        return Blocks(warm, gpu_only, _meanwhile(blocks.values(), at_once))

    def most_used_first(self) -> list[str]:
        """All entries, by hits, then by last use."""

        def rank(name: str) -> tuple[int, float]:
            entry = self.entries[name]
            return -entry.hits, -(entry.last_used or 0.0)

        return sorted(self.entries, key=rank)

    def count_uses(self, uses: Mapping[str, tuple[int, float]]) -> list[str]:
        """Requests have used entries, {entry: (hits, last use)}; returns those that are known."""
        known = [name for name in uses if name in self.entries]
        for name in known:
            hits, self.entries[name].last_used = uses[name]
            self.entries[name].hits += hits
        return known

    def _blocks(self, document: CatalogueDocument) -> Blocks:
        context, tokens = document.num_context, document.num_tokens
        warm = num_blocks(self._shape, document.compression, context, tokens)
        # The second tier finds records by their text, which kept tokens and stand-ins are not.
        is_gpu_only = document.compression is not None or self._shape.stand_ins is not None
        gpu_only = warm if is_gpu_only else 0
        return Blocks(warm, gpu_only, self._shape.num_blocks_meanwhile(tokens))


def _meanwhile(blocks: Iterable[Blocks], at_once: int) -> int:
    return sum(heapq.nlargest(at_once, (each.meanwhile for each in blocks)))


def place(documents: dict[str, CatalogueDocument], document: CatalogueDocument) -> None:
    """Put a document among those of its base: behind them, unless its text was there before."""
    before = documents.get(document.id)
    if before is not None and before.text != document.text:
        del documents[document.id]
    documents[document.id] = document
