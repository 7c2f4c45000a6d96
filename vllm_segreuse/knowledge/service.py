# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases of one engine: what is in them, and what of it is warm.

All state lives in this object and, through the store, in the manifest; which KV is in GPU memory is
asked of the scheduler's process each time. Everything runs in one event loop. Changes of the
manifest take turns; what blocks (SQLite, tokenizers) runs in one thread beside the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.knowledge import schemas
from vllm_segreuse.knowledge.chunks import Shape
from vllm_segreuse.knowledge.engine import Engine, fingerprint
from vllm_segreuse.knowledge.errors import (
    ConflictError,
    InvalidError,
    NoRoomError,
    NotFoundError,
)
from vllm_segreuse.knowledge.store import (
    IN_MEMORY,
    BaseRecord,
    DocumentRecord,
    Store,
    Tokens,
    entry_name,
)
from vllm_segreuse.knowledge.warming import Urgency, Warming

_T = TypeVar("_T")

logger = logging.getLogger("vllm.segreuse")


@dataclass
class _Document:
    """A document without its tokens; those stay in the manifest."""

    id: str
    entry: str
    num_tokens: int
    metadata: dict[str, Any]
    fault: str | None = None


@dataclass
class _Base:
    record: BaseRecord
    context: Tokens
    documents: dict[str, _Document] = field(default_factory=dict)


@dataclass
class _Entry:
    """What equal documents of one namespace share."""

    num_blocks: int
    owners: set[tuple[str, str]] = field(default_factory=set)
    hits: int = 0
    last_used: float | None = None


class KnowledgeService:
    """See the module.

    Args:
        engine: the engine.
        store: the manifest; closed with the service.
        shape: how documents are cut.
        poll_s: how often the scheduler is asked what was used and what should return.
    """

    def __init__(self, engine: Engine, store: Store, shape: Shape, poll_s: float = 2.0) -> None:
        self._engine = engine
        self._store = store
        self._shape = shape
        self._poll_s = poll_s
        self._bases: dict[str, _Base] = {}
        self._entries: dict[str, _Entry] = {}
        self._changing: set[tuple[str, str]] = set()
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="segreuse-knowledge")
        self._warming = Warming(engine, self._prompts, self._is_wanted)
        self._limit = 0
        self._unsaved: set[str] = set()
        self._poller: asyncio.Task[None] | None = None

    # Start and end.

    async def start(self, in_background: bool = True) -> None:
        """Read the manifest.

        Args:
            in_background: begin to warm what is in it, most used first, and go on to ask what was
                used meanwhile and what should return.
        """
        await self._in_thread(self._load)
        self._limit = (await self._state())["limit"]
        if not in_background:
            return
        room = self._limit
        for name in sorted(self._entries, key=self._popularity):
            room -= self._entries[name].num_blocks
            if room >= 0:  # a smaller cache than before: the rest stays cold
                self._warming.add(name, Urgency.BACKGROUND)
        self._poller = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop warming, save what was counted."""
        if self._poller is not None:
            self._poller.cancel()
        await self._warming.close()
        await self.save_uses()
        await self._in_thread(self._store.close)
        self._thread.shutdown()

    def _load(self) -> None:
        manifest = self._store.load()
        for found in manifest.bases:
            self._bases[found.name] = _Base(found, self._context(found.preamble))
        for record in manifest.documents:
            base = self._bases[record.base]
            fault = record.fault
            if fault is None and not np.array_equal(record.context, base.context):
                fault = "the model's first tokens, or its tokenizer, have changed: add it again"
            try:
                self._shape.num_chunks(len(base.context), 1)
            except InvalidError as error:
                fault = fault or str(error)
            self._remember(base, record, fault)
        for name, (hits, last_used) in manifest.uses.items():
            if name in self._entries:
                self._entries[name].hits, self._entries[name].last_used = hits, last_used

    def _popularity(self, entry: str) -> tuple[int, float]:
        found = self._entries[entry]
        return -found.hits, -(found.last_used or 0.0)

    # Bases.

    async def create_base(self, body: schemas.CreateBase) -> tuple[schemas.KnowledgeBase, bool]:
        """Create a base; the same again changes nothing.

        Returns:
            The base, and whether it is new.

        Raises:
            ConflictError: there is another base of this name.
            InvalidError: the preamble leaves no room for documents.
        """
        extra_key = body.name if body.extra_key is None else body.extra_key
        record = BaseRecord(body.name, extra_key, body.preamble, body.metadata, time.time())
        context = await self._in_thread(self._context, body.preamble)
        self._shape.num_chunks(len(context), 1)
        async with self._turn:
            known = self._bases.get(body.name)
            if known is None:
                await self._in_thread(self._store.add_base, record)
                self._bases[body.name] = _Base(record, context)
            elif _content(known.record) != _content(record):
                raise ConflictError(
                    f"a knowledge base {body.name!r} exists with another extra key, preamble or "
                    "metadata: delete it first, or choose another name",
                    "name",
                )
        return (await self.base(body.name)), known is None

    async def base(self, name: str) -> schemas.KnowledgeBase:
        """One base."""
        return self._show_base(self._base(name), (await self._state())["warm"])

    async def bases(self, after: str | None, limit: int) -> schemas.Page[schemas.KnowledgeBase]:
        """Part of the list of bases."""
        names, following = _page(self._bases, after, limit)
        warm = (await self._state())["warm"] if names else {}
        data = [self._show_base(self._bases[name], warm) for name in names if name in self._bases]
        return schemas.Page(data=data, next=following)

    async def delete_base(self, name: str) -> None:
        """Delete a base and its documents. Requests that read them go on."""
        async with self._turn:
            base = self._bases.get(name)
            if base is None:
                if await self._in_thread(self._store.was_deleted, name):
                    return
                self._base(name)
            with self._claim(name, ["", *(self._bases[name].documents)]):
                await self._in_thread(self._store.delete_base, name)
                documents = self._bases.pop(name).documents
                await self._disown(name, documents.values())

    # Documents.

    async def add(self, name: str, body: schemas.AddDocuments) -> list[schemas.Document]:
        """Add documents, all of them or none; same id and content: unchanged.

        Raises:
            NotFoundError: no such base.
            InvalidError: token ids that the model does not have.
            ConflictError: another request is adding or deleting one of them right now.
            NoRoomError: together they would exceed the frozen pool's share.
        """
        base = self._base(name)
        with self._claim(name, [d.id for d in body.documents]):
            records = await self._in_thread(self._tokenise, base, body.documents)
            async with self._turn:
                if self._bases.get(name) is not base:
                    self._base(name)
                    raise ConflictError(f"knowledge base {name!r} was just made anew: try again")
                self._check_room(base, records)
                await self._in_thread(self._store.put, base.record.extra_key, records)
                before = [base.documents.pop(r.id, None) for r in records]
                for record in records:
                    self._remember(base, record, None)
                await self._disown(name, (d for d in before if d is not None))
        return await self._warm(base, [r.id for r in records], body.wait)

    async def warm(self, name: str, body: schemas.WarmDocuments) -> list[schemas.Document]:
        """Bring documents back to GPU memory; warm ones stay as they are."""
        base = self._base(name)
        ids = sorted(base.documents) if body.ids is None else body.ids
        for document_id in ids:
            self._document(base, document_id)
        return await self._warm(base, ids, body.wait)

    async def document(self, name: str, document_id: str) -> schemas.Document:
        """One document."""
        base = self._base(name)
        self._document(base, document_id)
        warm = (await self._state())["warm"]
        return self._show(base, self._document(base, document_id), warm)

    async def documents(
        self, name: str, after: str | None, limit: int
    ) -> schemas.Page[schemas.Document]:
        """Part of the list of a base's documents."""
        base = self._base(name)
        ids, following = _page(base.documents, after, limit)
        warm = (await self._state())["warm"] if ids else {}
        data = [self._show(base, base.documents[i], warm) for i in ids if i in base.documents]
        return schemas.Page(data=data, next=following)

    async def delete(self, name: str, document_id: str) -> None:
        """Delete a document. Requests that read it go on."""
        base = self._base(name)
        with self._claim(name, [document_id]):
            async with self._turn:
                if document_id not in base.documents:
                    if await self._in_thread(self._store.was_deleted, name, document_id):
                        return
                    self._document(base, document_id)
                await self._in_thread(self._store.delete, name, document_id)
                await self._disown(name, [base.documents.pop(document_id)])

    async def stats(self) -> schemas.Stats:
        """All bases together."""
        state = await self._state()
        documents = [d for base in self._bases.values() for d in base.documents.values()]
        return schemas.Stats(
            blocks=schemas.BlockCounts(
                total=state["total"],
                frozen=state["frozen"],
                promised=self._promised(),
                limit=state["limit"],
                free=state["free"],
                block_size=state["block_size"],
            ),
            bases=len(self._bases),
            documents=self._count(documents, state["warm"]),
            hits=sum(entry.hits for entry in self._entries.values()),
            given_back=state["given_back"],
        )

    # What the scheduler knows.

    async def _state(self) -> dict[str, Any]:
        """The frozen pool as it is; what was used meanwhile is counted."""
        state = await self._engine.frozen()
        for name, (hits, last_used) in state["uses"].items():
            entry = self._entries.get(name)
            if entry is not None:
                entry.hits += hits
                entry.last_used = last_used
                self._unsaved.add(name)
        for name in state["wanted"]:
            if name in self._entries and self._warming.error(name) is None:
                self._warming.add(name, Urgency.BACKGROUND)
        return state

    async def _poll(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(self._poll_s)
            if not self._entries:
                continue
            try:
                await self._state()
                await self.save_uses()
            except Exception as error:  # whoever asks next is told, too
                if str(error) != said:
                    said = str(error)
                    logger.warning("segment reuse: knowledge bases: %s", said)

    async def save_uses(self) -> None:
        """Write what was counted since the last time into the manifest."""
        names, self._unsaved = self._unsaved, set()
        uses = [
            (name, self._entries[name].hits, self._entries[name].last_used)
            for name in names
            if name in self._entries
        ]
        if uses:
            await self._in_thread(self._store.save_uses, uses)

    async def _warm(self, base: _Base, ids: list[str], wait: bool) -> list[schemas.Document]:
        warm = (await self._state())["warm"]
        wanted = [base.documents[i].entry for i in ids if i in base.documents]
        jobs = [
            self._warming.add(name, Urgency.ASKED_FOR)
            for name in wanted
            if name not in warm and name in self._entries
        ]
        if wait and jobs:
            await asyncio.wait(jobs)
            warm = (await self._state())["warm"]
        return [self._show(base, base.documents[i], warm) for i in ids if i in base.documents]

    def _is_wanted(self, entry: str) -> bool:
        return entry in self._entries

    async def _prompts(self, entry: str) -> tuple[str, int, list[Tokens]] | None:
        """(extra key, tokens of context, prompts) of an entry; None if it has gone."""
        found = self._entries.get(entry)
        if found is None:
            return None
        name, document_id = min(found.owners)
        record = await self._in_thread(self._store.document, name, document_id)
        if record is None or record.fault or record.entry != entry:
            return None
        base = self._bases[name]
        prompts = self._shape.prompts(record.context, record.tokens)
        return base.record.extra_key, len(record.context), prompts

    # Tokens and room.

    def _context(self, preamble: str | None) -> Tokens:
        start = self._engine.start_tokens()
        return np.array(start + (self._engine.encode(preamble) if preamble else []), np.int32)

    def _tokenise(self, base: _Base, documents: list[schemas.NewDocument]) -> list[DocumentRecord]:
        records = []
        for i, document in enumerate(documents):
            ids = document.token_ids
            if ids is None:
                ids = self._engine.encode(document.text or "")
            if not ids:
                raise InvalidError("the text has no tokens", f"documents.{i}.text")
            if max(ids) >= self._engine.vocab_size:
                raise InvalidError(
                    f"token {max(ids)} is none of this model's {self._engine.vocab_size}",
                    f"documents.{i}.token_ids",
                )
            tokens = np.array(ids, np.int32)
            name = entry_name(base.record.extra_key, base.context, tokens)
            records.append(
                DocumentRecord(
                    base.record.name, document.id, base.context, tokens, document.metadata, name
                )
            )
        return records

    def _check_room(self, base: _Base, records: list[DocumentRecord]) -> None:
        blocks = {name: entry.num_blocks for name, entry in self._entries.items()}
        leaving: dict[str, set[str]] = {}
        for record in records:
            before = base.documents.get(record.id)
            if before is not None and before.fault is None:
                leaving.setdefault(before.entry, set()).add(record.id)
        for name, ids in leaving.items():
            if self._entries[name].owners <= {(base.record.name, i) for i in ids}:
                blocks.pop(name, None)
        for record in records:
            blocks[record.entry] = self._shape.num_blocks(len(record.context), len(record.tokens))
        needed = sum(blocks.values())
        if needed > self._limit:
            raise NoRoomError(
                f"all documents together would need {needed} KV blocks, and knowledge bases may "
                f"have {self._limit}: delete some, or raise frozen_share or the KV cache's size"
            )

    def _promised(self) -> int:
        return sum(entry.num_blocks for entry in self._entries.values())

    # Bookkeeping.

    def _remember(self, base: _Base, record: DocumentRecord, fault: str | None) -> None:
        document = _Document(record.id, record.entry, len(record.tokens), record.metadata, fault)
        base.documents[record.id] = document
        if fault is None:
            entry = self._entries.get(record.entry)
            if entry is None:
                num_blocks = self._shape.num_blocks(len(record.context), len(record.tokens))
                entry = self._entries[record.entry] = _Entry(num_blocks)
            entry.owners.add((base.record.name, record.id))

    async def _disown(self, base: str, documents: Iterable[_Document]) -> None:
        """Documents have left `base.documents`: entries that nobody else has are unfrozen."""
        gone = []
        for document in documents:
            entry = self._entries.get(document.entry)
            current = self._bases[base].documents.get(document.id) if base in self._bases else None
            if entry is None or (current is not None and current.entry == document.entry):
                continue
            entry.owners.discard((base, document.id))
            if not entry.owners:
                del self._entries[document.entry]
                gone.append(document.entry)
        if gone:
            await self._in_thread(self._store.forget_uses, gone)
            await self._engine.unfreeze(gone)

    @contextmanager
    def _claim(self, base: str, ids: Iterable[str]) -> Iterator[None]:
        """Of two requests that change one document at a time, the second is refused."""
        claimed = {(base, i) for i in ids}
        taken = claimed & self._changing
        if taken:
            raise ConflictError(
                f"document {min(taken)[1]!r} is being changed by another request: try again"
            )
        self._changing |= claimed
        try:
            yield
        finally:
            self._changing -= claimed

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    # Answers.

    def _base(self, name: str) -> _Base:
        if name not in self._bases:
            raise NotFoundError(f"there is no knowledge base {name!r}")
        return self._bases[name]

    def _document(self, base: _Base, document_id: str) -> _Document:
        if document_id not in base.documents:
            raise NotFoundError(
                f"there is no document {document_id!r} in knowledge base {base.record.name!r}"
            )
        return base.documents[document_id]

    def _status(self, document: _Document, warm: dict[str, Any]) -> schemas.Status:
        if document.fault is not None:
            return "failed"
        if document.entry in warm:
            return "warm"
        if self._warming.is_queued(document.entry):
            return "warming"
        return "failed" if self._warming.error(document.entry) else "cold"

    def _show(
        self, base: _Base, document: _Document, warm: dict[str, list[int]]
    ) -> schemas.Document:
        entry = self._entries.get(document.entry) if document.fault is None else None
        held = warm.get(document.entry) if entry is not None else None
        status = self._status(document, warm)
        blocks, references = 0, 0
        if entry is not None:
            blocks = entry.num_blocks
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
            last_used=_time(entry.last_used) if entry else None,
            error=document.fault
            or (self._warming.error(document.entry) if status == "failed" else None),
            metadata=document.metadata,
        )

    def _show_base(self, base: _Base, warm: dict[str, list[int]]) -> schemas.KnowledgeBase:
        documents = list(base.documents.values())
        entries = {d.entry for d in documents if d.fault is None}
        return schemas.KnowledgeBase(
            name=base.record.name,
            extra_key=base.record.extra_key,
            preamble=base.record.preamble,
            metadata=base.record.metadata,
            created_at=datetime.fromtimestamp(base.record.created_at, UTC),
            documents=self._count(documents, warm),
            tokens=sum(d.num_tokens for d in documents),
            blocks=sum(warm[name][0] for name in entries if name in warm),
            hits=sum(self._entries[name].hits for name in entries if name in self._entries),
        )

    def _count(self, documents: Iterable[_Document], warm: dict[str, Any]) -> schemas.Counts:
        counts = schemas.Counts()
        for document in documents:
            status = self._status(document, warm)
            setattr(counts, status, getattr(counts, status) + 1)
        return counts


async def start_service(
    engine: Engine, vllm_config: Any, config: SegReuseConfig, *, in_background: bool = False
) -> KnowledgeService:
    """Knowledge bases of an engine.

    Raises:
        ManifestError: the manifest's file cannot be used.
    """
    shape = Shape(
        block_size=vllm_config.cache_config.block_size,
        max_prompt_tokens=vllm_config.model_config.max_model_len - 1,
        chunk_tokens=config.knowledge_chunk_tokens,
    )
    store = Store(config.knowledge_path or IN_MEMORY, fingerprint(vllm_config, engine))
    service = KnowledgeService(engine, store, shape)
    await service.start(in_background)
    return service


def _content(base: BaseRecord) -> tuple[Any, ...]:
    return base.extra_key, base.preamble, base.metadata


def _page(names: Iterable[str], after: str | None, limit: int) -> tuple[list[str], str | None]:
    """Names behind `after`, in order, and where the next page begins."""
    ordered = sorted(name for name in names if after is None or name > after)
    page = ordered[:limit]
    return page, page[-1] if len(ordered) > limit else None


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
