# SPDX-License-Identifier: Apache-2.0
"""What is said of knowledge bases: the catalogue, what is warm of it, and what waits to be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from vllm_segreuse.features.knowledge import schemas
from vllm_segreuse.features.knowledge.catalogue import Catalogue, CatalogueBase, CatalogueDocument
from vllm_segreuse.features.knowledge.digests import document_digest
from vllm_segreuse.features.knowledge.warming import Warming

State = Mapping[str, Any]
"""`SchedulerSide.frozen`: `warm` is {entry: (blocks, running requests that hold them)}, `stored` is
{entry: place in the second tier}. Of several engines (`parallel.merged`), `engines` has the state
of each."""


class Answers:
    """Puts together what the routes answer.

    Args:
        catalogue: what there is.
        warming: what waits or has failed.
    """

    def __init__(self, catalogue: Catalogue, warming: Warming) -> None:
        self._catalogue = catalogue
        self._warming = warming

    def document(
        self, base: CatalogueBase, document: CatalogueDocument, state: State
    ) -> schemas.Document:
        """One document."""
        entry = None
        if document.fault is None:
            entry = self._catalogue.entries.get(document.entry)
        held = state["warm"].get(document.entry) if entry is not None else None
        status = self._status(document, state)
        blocks, references = 0, 0
        if entry is not None:
            blocks = entry.blocks.warm
            if held is not None:
                blocks, references = held[0], held[1] + len(entry.owners)
        return schemas.Document(
            id=document.id,
            base=base.record.name,
            status=status,
            tokens=document.num_tokens,
            blocks=blocks,
            hits=entry.hits if entry else 0,
            references=references,
            engines=[
                number
                for number, engine in enumerate(engines_of(state))
                if entry is not None and document.entry in engine["warm"]
            ],
            tier=None if entry is None else _tier(document.entry, state),
            last_used=_time(entry.last_used) if entry else None,
            error=document.fault
            or (self._warming.error(document.entry) if status == "failed" else None),
            metadata=json.loads(document.metadata),
            keep=document.compression and document.compression.keep,
            scorer=document.compression and document.compression.scorer,
        )

    def documents(
        self, base: CatalogueBase, ids: Iterable[str], state: State
    ) -> list[schemas.Document]:
        """Those that are still there."""
        found = (base.documents.get(document_id) for document_id in ids)
        return [self.document(base, document, state) for document in found if document is not None]

    def bases(self, names: Iterable[str], state: State) -> list[schemas.KnowledgeBaseStatus]:
        """Those that are still there."""
        found = (self._catalogue.bases.get(name) for name in names)
        return [self.base(base, state) for base in found if base is not None]

    def base(self, base: CatalogueBase, state: State) -> schemas.KnowledgeBaseStatus:
        """One base."""
        documents = list(base.documents.values())
        names = {d.entry for d in documents if d.fault is None}
        entries = [self._catalogue.entries[n] for n in names if n in self._catalogue.entries]
        return schemas.KnowledgeBaseStatus(
            name=base.record.name,
            extra_key=base.record.extra_key,
            preamble=base.record.preamble,
            context=base.record.context,
            metadata=base.record.metadata,
            created_at=datetime.fromtimestamp(base.record.created_at, UTC),
            documents=self._count(documents, state),
            tokens=sum(d.num_tokens for d in documents),
            blocks=sum(state["warm"][name][0] for name in names if name in state["warm"]),
            hits=sum(entry.hits for entry in entries),
        )

    def stats(self, state: State) -> schemas.Stats:
        """All bases together."""
        return schemas.Stats(
            blocks=self._blocks(state),
            engines=[self._blocks(engine) for engine in engines_of(state)],
            bases=len(self._catalogue.bases),
            documents=self._count(self._catalogue.documents(), state),
            hits=sum(entry.hits for entry in self._catalogue.entries.values()),
            given_back=state["given_back"],
        )

    def holdings(self, state: State, extra_key: str | None = None) -> schemas.Holdings:
        """What routers may know: documents that an engine holds as a whole, and where.

        Args:
            extra_key: of the bases; None: of all.
        """
        bases = [
            base
            for base in self._catalogue.bases.values()
            if extra_key in (None, base.record.extra_key)
        ]
        return schemas.Holdings(engines=[_held(bases, engine) for engine in engines_of(state)])

    def _blocks(self, state: State) -> schemas.BlockCounts:
        return schemas.BlockCounts(
            total=state["total"],
            frozen=state["frozen"],
            promised=self._catalogue.num_blocks(),
            limit=state["limit"],
            free=state["free"],
            block_size=state["block_size"],
        )

    def _status(self, document: CatalogueDocument, state: State) -> schemas.Status:
        if document.fault is not None:
            return "failed"
        if document.entry in state["warm"]:
            return "warm"
        if self._warming.is_queued(document.entry):
            return "warming"
        if document.entry in state["stored"]:
            return "stored"
        return "failed" if self._warming.error(document.entry) else "cold"

    def _count(
        self, documents: Iterable[CatalogueDocument], state: State
    ) -> schemas.DocumentCounts:
        counts = schemas.DocumentCounts()
        for document in documents:
            status = self._status(document, state)
            setattr(counts, status, getattr(counts, status) + 1)
        return counts


def engines_of(state: State) -> Sequence[State]:
    """States of the single engines."""
    return state.get("engines") or [state]


def _held(bases: Iterable[CatalogueBase], engine: State) -> schemas.EngineHoldings:
    """Of one engine. Where bases share a key and have documents of one id, that of the last."""
    documents = {}
    for base in bases:
        for document in base.documents.values():
            tier = None if document.fault else _tier(document.entry, engine)
            if tier is not None:
                digest = document_digest(document.id, [base.record.extra_key])
                held = schemas.HeldDocument(tokens=document.num_tokens, tier=tier)
                documents[digest] = held
    return schemas.EngineHoldings(documents=documents)


def _tier(entry: str, state: State) -> schemas.Tier | None:
    place: schemas.Tier | None = state["stored"].get(entry)
    return "gpu" if entry in state["warm"] else place


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
