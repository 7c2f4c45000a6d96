# SPDX-License-Identifier: Apache-2.0
"""What a request changes in a base: its own documents, and others whose context changes with them.

A change is written in one transaction, before anything is released or computed: after a crash the
manifest says what each document is computed behind. Everything here reads or writes the manifest,
and blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from vllm_segreuse.features.knowledge.catalogue import CatalogueBase, CatalogueDocument, place
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.siblings import SIBLING_TOKENS, BaseContexts, lead_documents
from vllm_segreuse.features.knowledge.store import (
    DocumentRecord,
    Store,
    Tokens,
    digest_of,
    entry_name,
)

UNREADABLE = "it cannot be read from the manifest any more: add it again"

_NOTHING: Tokens = np.empty(0, np.int32)


class Change(NamedTuple):
    """What is to become of a base.

    Attributes:
        records: the request's own documents, with their contexts.
        own: the same, as the catalogue keeps them.
        moved: other documents whose context changes, as they will be.
        gone: id of a document that is deleted.
        leads: `CatalogueBase.leads` afterwards.
        contexts: of all documents, afterwards.
    """

    records: list[DocumentRecord]
    own: list[CatalogueDocument]
    moved: list[CatalogueDocument]
    gone: str | None
    leads: dict[bytes, Tokens]
    contexts: BaseContexts

    @property
    def documents(self) -> list[CatalogueDocument]:
        """All that change, without the one that is deleted."""
        return [*self.own, *self.moved]


class Changes:
    """Plans changes of bases, and writes them. The base must not change in between.

    Args:
        store: the manifest.
        shape: how documents are cut.
    """

    def __init__(self, store: Store, shape: Shape) -> None:
        self._store = store
        self._shape = shape

    def plan(
        self,
        base: CatalogueBase,
        records: Sequence[DocumentRecord] = (),
        gone: str | None = None,
    ) -> Change:
        """What follows when these documents are added or replaced, and the one of this id deleted.

        Args:
            records: their contexts and entries are set by the rule of the base.
        """
        after = {i: document for i, document in base.documents.items() if i != gone}
        for record in records:
            place(after, CatalogueDocument.of(record))
        leads = self._leads(base, records, after.values())
        contexts = BaseContexts(base.context, leads, self._shape)
        put = [_behind(record, base.record.extra_key, contexts) for record in records]
        others = after.keys() - {record.id for record in records}
        moved = [
            self._moved(base, document, contexts)
            for document in after.values()
            if document.id in others
            and document.fault is None
            and document.context != contexts.of(document.text).digest
        ]
        own = [CatalogueDocument.of(record) for record in put]
        return Change(put, own, moved, gone, leads, contexts)

    def write(self, base: CatalogueBase, change: Change) -> None:
        """Write it to the manifest, all of it or nothing."""
        extra_key, moved = base.record.extra_key, self._moved_records(base, change)
        if change.gone is None:
            self._store.put(extra_key, chain(change.records, moved))
        else:
            self._store.delete(base.record.name, change.gone, extra_key, moved)

    def _leads(
        self,
        base: CatalogueBase,
        records: Iterable[DocumentRecord],
        documents: Iterable[CatalogueDocument],
    ) -> dict[bytes, Tokens]:
        if base.record.context == "none":
            return {}
        added = {record.id: record for record in records}
        leads = {}
        for document in lead_documents(documents):
            tokens = base.leads.get(document.text)
            if tokens is None:
                record = added.get(document.id) or self._read(base, document.id)
                tokens = record.tokens[:SIBLING_TOKENS].copy() if record else _NOTHING
            leads[document.text] = tokens
        return leads

    def _moved(
        self, base: CatalogueBase, document: CatalogueDocument, contexts: BaseContexts
    ) -> CatalogueDocument:
        record = self._read(base, document.id)
        if record is None:
            return replace(document, fault=UNREADABLE)
        return CatalogueDocument.of(_behind(record, base.record.extra_key, contexts))

    def _moved_records(self, base: CatalogueBase, change: Change) -> Iterator[DocumentRecord]:
        for document in change.moved:
            record = None if document.fault else self._read(base, document.id)
            if record is not None:
                yield _behind(record, base.record.extra_key, change.contexts)

    def _read(self, base: CatalogueBase, document_id: str) -> DocumentRecord | None:
        record = self._store.document(base.record.extra_key, base.record.name, document_id)
        return None if record is None or record.fault else record


def _behind(record: DocumentRecord, extra_key: str, contexts: BaseContexts) -> DocumentRecord:
    context = contexts.of(digest_of(record.tokens)).tokens
    entry = entry_name(extra_key, context, record.tokens, record.compression)
    return replace(record, context=context, entry=entry)
