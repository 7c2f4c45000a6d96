# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases of one engine: what is done with them.

    service ─► answers ─► catalogue      what there is, as reported and as stored
        │         └────► warming         what waits to be computed ─► engine
        ├──────► scheduler_state         which KV is in GPU memory ─► engine
        └──────► store                   the manifest

The scheduler's process is asked each time. Everything runs in one event loop. Changes of the
manifest take turns. What blocks runs in two threads beside the loop: SQLite in one, the tokenizer
in the other, so that requests that name documents do not wait for the texts of uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from vllm_segreuse.features.knowledge import schemas
from vllm_segreuse.features.knowledge.answers import Answers, engines_of
from vllm_segreuse.features.knowledge.catalogue import Catalogue, CatalogueBase, CatalogueDocument
from vllm_segreuse.features.knowledge.changes import UNREADABLE, Change, Changes
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.database import IN_MEMORY
from vllm_segreuse.features.knowledge.engine import Engine, fingerprint
from vllm_segreuse.features.knowledge.errors import (
    ConflictError,
    InvalidError,
    NoRoomError,
    NotFoundError,
    UnavailableError,
)
from vllm_segreuse.features.knowledge.isolated import IsolatedDocuments, isolated_documents
from vllm_segreuse.features.knowledge.naming import NamedDocument, shown
from vllm_segreuse.features.knowledge.options import KnowledgeOptions
from vllm_segreuse.features.knowledge.restoring import restore
from vllm_segreuse.features.knowledge.scheduler_state import SchedulerState, Uses
from vllm_segreuse.features.knowledge.store import BaseRecord, DocumentRecord, Store, Tokens
from vllm_segreuse.features.knowledge.texts import DocumentTexts
from vllm_segreuse.features.knowledge.warming import AT_ONCE, Urgency, Warming
from vllm_segreuse.features.knowledge.work import Work, work_for
from vllm_segreuse.options.parsing import DOCUMENTS
from vllm_segreuse.options.server import ServerOptions

_T = TypeVar("_T")

MAX_HELD_BYTES = 256 * 2**20
"""Memory that bases and documents may take here, without their tokens, which are in the manifest.
Documents with equal texts take no KV blocks, so that these alone would be no bound."""

_ROUNDS = 4
"""How often a document is computed while a caller waits: a second tier that is busy writing to disk
may have no room for all that is computed at once."""

logger = logging.getLogger("vllm.segreuse")


class KnowledgeService:
    """See the module.

    Args:
        engine: the engine.
        store: the manifest; closed with the service.
        shape: how documents are cut.
        poll_s: how often the scheduler is asked what was used and what should return.
        isolated: documents of a model that was trained on documents computed alone; None: of an
            ordinary one.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        shape: Shape,
        poll_s: float = 2.0,
        isolated: IsolatedDocuments | None = None,
    ) -> None:
        self._texts = DocumentTexts(engine, shape, isolated)
        self._store = store
        self._shape = shape
        self._catalogue = Catalogue(shape)
        self._changes = Changes(store, shape)
        self._changing: set[tuple[str, str]] = set()
        self._turn = asyncio.Lock()
        self._sqlite = ThreadPoolExecutor(1, thread_name_prefix="segreuse-knowledge")
        self._tokenizer = ThreadPoolExecutor(1, thread_name_prefix="segreuse-tokenizer")
        self._warming = Warming(
            engine, self._work_of, self._is_wanted, self._write_kept, self._names_of
        )
        self._answers = Answers(self._catalogue, self._warming)
        self._scheduler = SchedulerState(
            engine, self._catalogue, self._warming, self._write_uses, poll_s
        )
        self._limit = self._frozen_limit = 0

    @property
    def catalogue(self) -> Catalogue:
        """What there is. Only the service changes it."""
        return self._catalogue

    @property
    def store(self) -> Store:
        """The manifest."""
        return self._store

    @property
    def warming(self) -> Warming:
        """What waits to be computed."""
        return self._warming

    # Start and end.

    async def start(self, in_background: bool = True) -> None:
        """Read the manifest.

        Args:
            in_background: begin to warm what is in it and not in the second tier, most used first,
                and go on to ask what was used meanwhile and what should return.
        """
        await _in_thread(self._sqlite, self._load)
        await self._follow_the_rules()
        state = await self._scheduler.read()
        self._limit, self._frozen_limit = state["limit"], state["frozen_limit"]
        # The second tier may hold what was deleted just before the last run ended, or, of engines
        # that did not take part in it, at any time before.
        held = {name for engine in engines_of(state) for name in engine["stored"]}
        await self._warming.let_go(held - self._catalogue.entries.keys())
        if not in_background:
            return
        self._warm_what_fits(state["stored"])
        self._scheduler.start_polling()

    def _warm_what_fits(self, stored: Container[str]) -> None:
        meanwhile = self._catalogue.num_blocks_meanwhile(AT_ONCE)
        room, gpu_room = self._limit - meanwhile, self._frozen_limit - meanwhile
        for name in self._catalogue.most_used_first():
            blocks = self._catalogue.entries[name].blocks
            room -= blocks.warm
            gpu_room -= blocks.gpu_only
            # A smaller cache than before: the rest stays cold.
            fits = room >= 0 and (gpu_room >= 0 or not blocks.gpu_only)
            if fits and name not in stored:
                self._warming.add(name, Urgency.BACKGROUND)

    async def close(self) -> None:
        """Stop warming, save what was counted, let the manifest go."""
        try:
            await self._scheduler.stop()
            await self._warming.close()
            await self._scheduler.save_the_last_uses()
        finally:
            await _in_thread(self._sqlite, self._store.close)
            self._sqlite.shutdown()
            self._tokenizer.shutdown()

    def _load(self) -> None:
        restore(self._catalogue, self._store.load(), self._shape, self._texts.context)

    async def _follow_the_rules(self) -> None:
        """Contexts are as when they were written, unless a limit, a rule or a lead document's row
        is not. Nothing is warm yet, so that this costs no computation."""
        sound = [base for base in self._catalogue.bases.values() if base.record.fault is None]
        for base in sound:
            try:
                change = await self._in_store(self._changes.plan, base)
                await self._carry_out(base, change)
            except UnavailableError as error:
                logger.warning(
                    "segment reuse: knowledge bases: contexts stay as they are: %s", error
                )

    # Bases.

    async def create_base(
        self, body: schemas.CreateBase
    ) -> tuple[schemas.KnowledgeBaseStatus, bool]:
        """Create a base; the same again changes nothing.

        Returns:
            The base, and whether it is new.

        Raises:
            ConflictError: there is another base of this name.
            InvalidError: the preamble leaves no room for documents, or the model's documents are
                computed behind nothing.
            NoRoomError: all bases together would take too much of this process's memory.
        """
        extra_key = body.name if body.extra_key is None else body.extra_key
        record = BaseRecord(
            *(body.name, extra_key, body.preamble, body.metadata, time.time()),
            body.context or self._texts.default_context,
        )
        context = await _in_thread(self._tokenizer, self._texts.context, record)
        self._shape.num_chunks(len(context), 1)
        async with self._turn:
            known = self._catalogue.bases.get(body.name)
            if known is None:
                base = CatalogueBase(record, context)
                self._check_memory(base.num_bytes)
                await self._in_store(self._store.add_base, record)
                self._catalogue.bases[body.name] = base
            elif others := _differing(known.record, record, body):
                differing = " and another ".join(others)
                raise ConflictError(
                    f"a knowledge base {body.name!r} exists with another {differing}: delete it "
                    "first, or choose another name",
                    "name",
                )
        return (await self.base(body.name)), known is None

    async def base(self, name: str) -> schemas.KnowledgeBaseStatus:
        """One base."""
        return self._answers.base(self._catalogue.base(name), await self._scheduler.read())

    async def bases(
        self, after: str | None, limit: int
    ) -> schemas.Page[schemas.KnowledgeBaseStatus]:
        """Part of the list of bases."""
        names, following = _page(self._catalogue.bases, after, limit)
        found = self._answers.bases(names, await self._scheduler.read()) if names else []
        return schemas.Page(data=found, next=following)

    async def delete_base(self, name: str) -> None:
        """Delete a base and its documents. Requests that read them go on."""
        async with self._turn:
            base = self._catalogue.bases.get(name)
            if base is None:
                if await self._in_store(self._store.was_deleted, name):
                    return
                self._catalogue.base(name)
            with self._claim(name, ["", *(self._catalogue.bases[name].documents)]):
                await self._in_store(self._store.delete_base, name)
                documents = self._catalogue.bases.pop(name).documents
                await self._disown(name, documents.values())

    # Documents.

    async def add(self, name: str, body: schemas.AddDocuments) -> list[schemas.Document]:
        """Add documents, all of them or none; same id and content: unchanged.

        Raises:
            NotFoundError: no such base.
            InvalidError: token ids that the model does not have.
            ConflictError: another request is adding or deleting one of them right now.
            NoRoomError: together they would exceed the frozen pool's share and the second tier, or
                those in GPU memory only the share; or take too much of this process's memory.
        """
        base = self._catalogue.base(name)
        if base.record.fault:
            raise ConflictError(base.record.fault)
        with self._claim(name, [d.id for d in body.documents]):
            records = await _in_thread(self._tokenizer, self._texts.records, base, body.documents)
            async with self._turn:
                if self._catalogue.bases.get(name) is not base:
                    self._catalogue.base(name)
                    raise ConflictError(f"knowledge base {name!r} was just made anew: try again")
                change = await self._in_store(self._changes.plan, base, records)
                self._check_room(base, change.documents)
                self._check_memory(self._catalogue.num_more_bytes(base, change.documents))
                change = await self._in_store(self._with_choices, change)
                await self._carry_out(base, change)
        return await self._warm(base, [r.id for r in records], body.wait, change=change)

    async def warm(self, name: str, body: schemas.WarmDocuments) -> list[schemas.Document]:
        """Bring documents back to GPU memory; warm ones stay as they are. Stored ones are copied
        from the second tier, if their context is there, and else computed."""
        base = self._catalogue.base(name)
        ids = sorted(base.documents) if body.ids is None else body.ids
        for document_id in ids:
            self._catalogue.document(base, document_id)
        return await self._warm(base, ids, body.wait, stored_too=True)

    async def document(self, name: str, document_id: str) -> schemas.Document:
        """One document."""
        base = self._catalogue.base(name)
        self._catalogue.document(base, document_id)
        state = await self._scheduler.read()
        return self._answers.document(base, self._catalogue.document(base, document_id), state)

    async def text(self, name: str, document_id: str) -> schemas.DocumentText:
        """What was made of a document, which requests must contain.

        Raises:
            NotFoundError: no such base or document.
            ConflictError: the manifest does not have it any more.
        """
        base = self._catalogue.base(name)
        self._catalogue.document(base, document_id)
        record = await self._in_store(
            self._store.document, base.record.extra_key, name, document_id
        )
        if fault := _fault_of(record):
            self._catalogue.document(self._catalogue.base(name), document_id)  # deleted meanwhile?
            raise ConflictError(f"the document {document_id!r} cannot be read: {fault}")
        assert record is not None
        return await _in_thread(self._tokenizer, self._texts.shown, record)

    async def documents(
        self, name: str, after: str | None, limit: int
    ) -> schemas.Page[schemas.Document]:
        """Part of the list of a base's documents."""
        base = self._catalogue.base(name)
        ids, following = _page(base.documents, after, limit)
        found = self._answers.documents(base, ids, await self._scheduler.read()) if ids else []
        return schemas.Page(data=found, next=following)

    async def delete(self, name: str, document_id: str) -> None:
        """Delete a document. Requests that read it go on."""
        base = self._catalogue.base(name)
        with self._claim(name, [document_id]):
            async with self._turn:
                if document_id not in base.documents:
                    if await self._in_store(self._store.was_deleted, name, document_id):
                        return
                    self._catalogue.document(base, document_id)
                change = await self._in_store(self._changes.plan, base, (), document_id)
                await self._carry_out(base, change)
                self._warm_in_background(change)

    async def _carry_out(self, base: CatalogueBase, change: Change) -> None:
        """The manifest first: whatever happens then, a restart begins with what it says."""
        if change.documents or change.gone is not None:
            await self._in_store(self._changes.write, base, change)
        before = [base.documents.get(document.id) for document in change.documents]
        if change.gone is not None:
            before.append(base.documents.pop(change.gone))
        for document in change.documents:
            self._catalogue.put(base, document)
        base.leads = change.leads
        self._scheduler.changed(document.entry for document in change.moved)
        await self._disown(base.record.name, (d for d in before if d is not None))

    async def stats(self) -> schemas.Stats:
        """All bases together."""
        return self._answers.stats(await self._scheduler.read())

    async def holdings(self, extra_key: str | None = None) -> schemas.Holdings:
        """What each engine holds of them, for routers."""
        return self._answers.holdings(await self._scheduler.read(), extra_key)

    async def save_uses(self) -> None:
        """Write what was counted since the last time into the manifest.

        Raises:
            UnavailableError: it could not be written; the next time tries it again.
        """
        await self._scheduler.save_uses()

    # Warming.

    async def _warm(
        self,
        base: CatalogueBase,
        ids: list[str],
        wait: bool,
        *,
        change: Change | None = None,
        stored_too: bool = False,
    ) -> list[schemas.Document]:
        """Compute documents of a request, and lead documents that change with them; what else
        changes follows in the background."""
        state = await self._scheduler.read()
        there = state["warm"] if stored_too else state["warm"].keys() | state["stored"].keys()
        wanted = [base.documents[i].entry for i in ids if i in base.documents]
        if change is not None:
            wanted += [document.entry for document in change.moved if document.text in base.leads]
        jobs = [
            self._warming.add(name, Urgency.ASKED_FOR)
            for name in wanted
            if name not in there and name in self._catalogue.entries
        ]
        if change is not None:
            self._warm_in_background(change)
        for _ in range(_ROUNDS):
            if not (wait and jobs):
                break
            await asyncio.wait(jobs)
            state = await self._scheduler.read()
            jobs = [
                self._warming.add(name, Urgency.ASKED_FOR)
                for name in sorted({*wanted} & {*state["wanted"]})
                if self._warming.is_queued(name)
            ]
        return self._answers.documents(base, ids, state)

    def _warm_in_background(self, change: Change) -> None:
        for document in change.moved:
            if self._is_wanted(document.entry):
                self._warming.add(document.entry, Urgency.BACKGROUND)

    async def finish(self) -> None:
        """Wait until nothing is to be computed any more."""
        await self._warming.finish()

    def _is_wanted(self, entry: str) -> bool:
        return entry in self._catalogue.entries

    def _names_of(self, entry: str) -> list[str]:
        """`BASE/ID` of the documents that have an entry, as the log shows them."""
        found = self._catalogue.entries.get(entry)
        owners = sorted(found.owners) if found is not None else ()
        return [repr(shown(f"{name}/{document_id}")) for name, document_id in owners]

    async def _work_of(self, entry: str) -> Work | None:
        """What is to be computed for an entry; None if it has gone."""
        found = self._catalogue.entries.get(entry)
        if found is None:
            return None
        name, document_id = min(found.owners)
        base = self._catalogue.bases[name]
        extra_key = base.record.extra_key
        record = await self._in_store(self._store.document, extra_key, name, document_id)
        if record is None or record.fault or record.entry != entry:
            return None
        tokens = (record.context, record.tokens)
        return work_for(self._shape, extra_key, *tokens, record.compression, record.kept)

    async def _write_kept(self, entry: str, kept: Tokens) -> None:
        """Which tokens of a compressed entry are kept, for all documents that have it."""
        async with self._turn:
            found = self._catalogue.entries.get(entry)
            for name, document_id in sorted(found.owners) if found is not None else ():
                extra_key = self._catalogue.bases[name].record.extra_key
                await self._in_store(self._store.keep, extra_key, name, document_id, entry, kept)

    # Requests that name documents.

    async def named(self, names: Sequence[str], extra_keys: Sequence[str]) -> list[NamedDocument]:
        """The compressed documents that a request names; those that anything stands for
        are warm then.

        Args:
            names: `BASE/ID` of each.
            extra_keys: of the request.

        Raises:
            NotFoundError: there is no such document in the request's namespace.
            InvalidError: it is not compressed.
            ConflictError: it cannot be served, or is not compressed yet.
        """
        found = [await self._named(name, tuple(extra_keys)) for name in names]
        if self._shape.stand_ins is not None:
            await self._warm_named(found)
        return found

    async def _warm_named(self, documents: Sequence[NamedDocument]) -> None:
        """Compute those that are cold: their request cannot be answered without them."""
        state = await self._scheduler.read()
        jobs = [
            self._warming.add(document.entry, Urgency.ASKED_FOR)
            for document in documents
            if document.entry not in state["warm"]
        ]
        if jobs:
            await asyncio.wait(jobs)
        for document in documents:
            if error := self._warming.error(document.entry):
                raise ConflictError(f"{DOCUMENTS}: the document {shown(document.name)!r}: {error}")

    async def _named(self, name: str, extra_keys: tuple[str, ...]) -> NamedDocument:
        base_name, _, document_id = name.partition("/")
        base = self._catalogue.bases.get(base_name)
        document = None if base is None else base.documents.get(document_id)
        if base is None or document is None or (base.record.extra_key,) != extra_keys:
            raise NotFoundError(
                f"{DOCUMENTS}: there is no document {shown(name)!r} (BASE/ID) in the namespace of "
                "this request: add it, or name its base's extra key in extra_keys",
                DOCUMENTS,
            )
        stand_ins = self._shape.stand_ins
        if document.compression is None and stand_ins is None:
            raise InvalidError(
                f"{DOCUMENTS}: the document {shown(name)!r} is not compressed: send its text",
                DOCUMENTS,
            )
        record = await self._in_store(
            self._store.document, base.record.extra_key, base_name, document_id
        )
        if fault := document.fault or _fault_of(record):
            raise ConflictError(
                f"{DOCUMENTS}: the document {shown(name)!r} failed: {fault}", DOCUMENTS
            )
        assert record is not None
        if stand_ins is not None:
            text = stand_ins.standing_for(len(record.tokens) - 2)  # between its start and end token
            return NamedDocument(name, record.entry, np.array(text, np.int32))
        if record.kept is None:
            error = self._warming.error(record.entry) or "it is still being compressed: try again"
            raise ConflictError(f"{DOCUMENTS}: the document {shown(name)!r}: {error}", DOCUMENTS)
        return NamedDocument(name, record.entry, record.tokens[record.kept])

    # Choices and room.

    def _with_choices(self, change: Change) -> Change:
        """Where the tokens of a compressed entry were chosen, another document of it has them; and
        so has the same document as it was, in another context."""
        return change._replace(records=[self._with_choice(record) for record in change.records])

    def _with_choice(self, record: DocumentRecord) -> DocumentRecord:
        if record.compression is None:
            return record
        entry = self._catalogue.entries.get(record.entry)
        name, document_id = (record.base, record.id) if entry is None else min(entry.owners)
        extra_key = self._catalogue.bases[name].record.extra_key
        other = self._store.document(extra_key, name, document_id)
        if other is None or other.fault or other.compression != record.compression:
            return record
        if other.kept is None or not np.array_equal(other.tokens, record.tokens):
            return record
        made_of = record.context, record.tokens, record.compression
        fits = work_for(self._shape, extra_key, *made_of, other.kept).kept is not None
        return replace(record, kept=other.kept) if fits else record

    def _check_room(self, base: CatalogueBase, documents: list[CatalogueDocument]) -> None:
        needed, gpu_only, meanwhile = self._catalogue.num_blocks_with(base, documents, AT_ONCE)
        besides = f", and {meanwhile} more while they are computed" if meanwhile else ""
        if needed + meanwhile > self._limit:
            raise NoRoomError(
                f"all documents together would need {needed} KV blocks{besides}, and knowledge "
                f"bases may have {self._limit}: delete some, or raise frozen_share, the KV cache's "
                "size or the second tier's"
            )
        if gpu_only + meanwhile > self._frozen_limit:
            raise NoRoomError(
                "documents that are compressed or have anchors are kept in GPU memory only: "
                f"together they would need {gpu_only} KV blocks{besides}, and knowledge bases may "
                f"have {self._frozen_limit} there: delete some, or raise frozen_share or the KV "
                "cache's size"
            )

    def _check_memory(self, more_bytes: int) -> None:
        needed = self._catalogue.num_bytes + more_bytes
        if needed > MAX_HELD_BYTES:
            raise NoRoomError(
                f"names, preambles and metadata of all bases and documents would take {needed} "
                f"bytes of the server's memory, of at most {MAX_HELD_BYTES}: delete some, or send "
                "less metadata"
            )

    async def _disown(self, base: str, documents: Iterable[CatalogueDocument]) -> None:
        """Documents have left `base.documents`: entries that nobody else has are unfrozen."""
        left = list(documents)
        await self._warming.let_go(self._catalogue.disown(base, left))
        try:
            if left:
                await self._in_store(self._store.forget_uses, {it.entry for it in left})
        except UnavailableError as error:  # the documents have left all the same
            logger.warning("segment reuse: old counts stay until the next start: %s", error)

    @contextlib.contextmanager
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

    async def _write_uses(self, uses: Uses) -> None:
        await self._in_store(self._store.save_uses, uses)

    async def _in_store(self, method: Callable[..., _T], *args: Any) -> _T:
        try:
            return await _in_thread(self._sqlite, method, *args)
        except sqlite3.Error as error:
            raise UnavailableError(f"the manifest cannot be read or written: {error}") from error


async def start_service(
    engine: Engine, vllm_config: Any, config: ServerOptions, *, in_background: bool = False
) -> KnowledgeService:
    """Knowledge bases of an engine.

    Raises:
        ManifestError: the manifest's file cannot be used.
    """
    options = KnowledgeOptions.of(config)
    isolated = isolated_documents(vllm_config.model_config, engine.encode)
    shape = Shape(
        block_size=vllm_config.cache_config.block_size,
        max_prompt_tokens=vllm_config.model_config.max_model_len - 1,
        chunk_tokens=options.knowledge_chunk_tokens,
        stages=vllm_config.parallel_config.pipeline_parallel_size,
    )
    if isolated is not None:
        shape = isolated.shape(shape)
    store = Store(options.knowledge_path or IN_MEMORY, fingerprint(vllm_config, engine))
    service = KnowledgeService(engine, store, shape, isolated=isolated)
    await service.start(in_background)
    return service


def service_of(state: Any) -> KnowledgeService:
    """The service that an application's `state` holds.

    Raises:
        UnavailableError: it has none, since its process serves with several others.
    """
    service: KnowledgeService | None = getattr(state, "service", None)
    if service is None:
        raise UnavailableError(
            "knowledge bases need one API server with all engines: start with --api-server-count 1"
        )
    return service


async def _in_thread(thread: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> _T:
    return await asyncio.get_running_loop().run_in_executor(thread, function, *args)


def _fault_of(record: DocumentRecord | None) -> str | None:
    """Why what the store has of a document cannot be used; None: it can."""
    return UNREADABLE if record is None else record.fault


def _differing(one: BaseRecord, other: BaseRecord, body: schemas.CreateBase) -> list[str]:
    """What two bases of one name do not have in common; a context only if the request names one."""
    compared = {
        "extra key": (one.extra_key, other.extra_key),
        "preamble": (one.preamble, other.preamble),
        "metadata": (one.metadata, other.metadata),
        "context": (one.context, other.context if body.context else one.context),
    }
    return [name for name, (here, there) in compared.items() if here != there]


def _page(names: Iterable[str], after: str | None, limit: int) -> tuple[list[str], str | None]:
    """Names behind `after`, in order, and where the next page begins."""
    ordered = sorted(name for name in names if after is None or name > after)
    page = ordered[:limit]
    return page, page[-1] if len(ordered) > limit else None
