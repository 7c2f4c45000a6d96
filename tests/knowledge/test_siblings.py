# SPDX-License-Identifier: Apache-2.0
"""Documents are computed behind two others of their base, and behind none that was deleted."""

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.integrity import check_integrity, frozen_parts
from tests.knowledge import fake_engine
from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from tests.knowledge.test_service import damage
from vllm_segreuse.features.knowledge import siblings, warming
from vllm_segreuse.features.knowledge.catalogue import CatalogueDocument
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.errors import ConflictError, NoRoomError, UnavailableError
from vllm_segreuse.features.knowledge.schemas import AddDocuments, CreateBase, Document
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.features.knowledge.siblings import BaseContexts, lead_documents
from vllm_segreuse.features.knowledge.store import DocumentRecord
from vllm_segreuse.plan import FreezeOrder

SHAPE = Shape(block_size=BLOCK_SIZE, max_prompt_tokens=255, chunk_tokens=40)
START = [1] * BLOCK_SIZE
A, B, C, D, E = ([*range(100 * n, 100 * n + 36)] for n in range(1, 6))
SHORT = [7] * 31
"""A token more, and others would be computed behind it."""


class Engine(FakeEngine):
    """Remembers what it computed each entry behind.

    Attributes:
        contexts: of the parts of an entry.
    """

    def __init__(self, limit: int = 90) -> None:
        super().__init__(limit)
        self.start = START
        self.contexts: dict[str, list[list[int]]] = {}

    async def compute(self, tokens: list[int], extra_key: str, order: FreezeOrder) -> bool:
        self.contexts.setdefault(order.entry, []).append(tokens[: order.first_token])
        return await super().compute(tokens, extra_key, order)

    def frozen_behind(self) -> list[int]:
        """All tokens that something frozen was computed behind."""
        held = [context for entry in frozen_parts(self.pool) for context in self.contexts[entry]]
        return [token for context in held for token in context]


serving = partial(fake_engine.serving, shape=SHAPE)


def run(
    test: Callable[[KnowledgeService, Engine], Awaitable[None]],
    limit: int = 90,
    shape: Shape = SHAPE,
) -> None:
    async def main() -> None:
        engine = Engine(limit)
        async with serving(engine, shape=shape) as service:
            await service.create_base(CreateBase(name="base"))
            await test(service, engine)
            check_integrity(engine.pool)

    asyncio.run(main())


async def add(
    service: KnowledgeService, base: str = "base", wait: bool = True, **content: list[int]
) -> list[Document]:
    documents: Any = [{"id": i, "token_ids": ids} for i, ids in content.items()]
    return await service.add(base, AddDocuments(documents=documents, wait=wait))


def behind(
    service: KnowledgeService, engine: Engine, base: str = "base", faulty: Container[str] = ()
) -> dict[str, list[int]]:
    """What each document was computed behind, without the tokens that all begin with.

    Args:
        faulty: documents that were not computed.
    """
    found = {}
    for document in service.catalogue.bases[base].documents.values():
        if document.id in faulty:
            continue
        contexts = engine.contexts[document.entry]
        assert all(context == contexts[0] for context in contexts), "its chunks differ"
        assert contexts[0][: len(START)] == START
        found[document.id] = contexts[0][len(START) :]
    return found


async def all_warm(service: KnowledgeService, base: str = "base") -> None:
    await asyncio.wait_for(service.finish(), 5)
    page = await service.documents(base, None, 100)
    assert {d.status for d in page.data} == {"warm"}, page.data


# The rule by itself.


def kept(document_id: str, tokens: list[int], fault: str | None = None) -> CatalogueDocument:
    nothing = np.empty(0, np.int32)
    record = DocumentRecord("base", document_id, nothing, np.array(tokens, np.int32), {}, "entry")
    return CatalogueDocument.of(record, fault)


def test_leads_are_the_first_three_that_are_long_enough_and_differ() -> None:
    documents = [
        *(kept("short", SHORT), kept("a", A), kept("twin", A), kept("torn", E, "torn")),
        *(kept("z", B), kept("c", C), kept("d", D)),
    ]
    assert [lead.id for lead in lead_documents(documents)] == ["a", "z", "c"]
    assert lead_documents([kept("just", [7] * 32)])
    assert lead_documents([]) == lead_documents([kept("short", SHORT)]) == []


def contexts(base: list[int], shape: Shape, *leads: list[int]) -> BaseContexts:
    tokens = [np.array(lead, np.int32) for lead in leads]
    by_text = {kept("", lead).text: part for lead, part in zip(leads, tokens, strict=True)}
    return BaseContexts(np.array(base, np.int32), by_text, shape)


def test_a_document_is_behind_the_first_two_leads_but_itself() -> None:
    of = contexts(START, SHAPE, A, B, C).of
    found = [of(kept("", text).text).tokens.tolist() for text in (A, B, C, D, SHORT)]
    assert found == [START + B + C, START + A + C, *([START + A + B] * 3)]
    alone = contexts(START, SHAPE, A).of
    assert alone(kept("", A).text).tokens.tolist() == START
    assert alone(kept("", B).text).tokens.tolist() == START + A


def test_siblings_are_cut_and_leave_documents_half_of_the_longest_prompt() -> None:
    texts = [[n] * 5000 for n in (2, 3)]

    def num_tokens(max_prompt_tokens: int, num_base: int = 1) -> int:
        shape = Shape(16, max_prompt_tokens, 2048)
        return len(contexts([1] * num_base, shape, *texts).of(b"").tokens)

    assert num_tokens(100_000) == 2 * 512, "whole blocks"
    assert num_tokens(1000) == (1 + 2 * 249) // 16 * 16
    assert num_tokens(2 * (2 * 32 + 1)) == 2 * 32
    assert num_tokens(2 * (2 * 32 + 1) - 1) == 1, "too short to be worth it"
    assert num_tokens(1000, num_base=700) == 700, "the preamble alone takes more than half"


# What the service makes of it.


def test_documents_of_one_request_are_computed_once_behind_its_first_ones() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        added = await add(service, z=A, tiny=SHORT, b=B, c=C, twin=A, d=D)
        assert {document.status for document in added} == {"warm"}
        found = behind(service, engine)
        assert [found[i] for i in ("z", "twin", "b", "c")] == [B + C, B + C, A + C, A + B]
        assert found["tiny"] == found["d"] == A + B
        assert len(engine.computed) == 5, "each once, equal texts together"

    run(test)


def test_every_chunk_of_a_long_document_is_behind_the_same() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        await add(service, a=A, b=B, long=[*range(500, 600)])
        (entry,) = {entry for entry, part in engine.computed if part == 2}
        assert engine.contexts[entry] == [START + A + B] * 3

    run(test)


def test_the_first_documents_are_computed_again_behind_those_that_follow() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        seen = []
        for name, text in (("a", A), ("b", B), ("c", C), ("d", D)):
            await add(service, **{name: text})
            await all_warm(service)
            seen.append(behind(service, engine))
        assert seen == [
            {"a": []},
            {"a": B, "b": A},
            {"a": B + C, "b": A + C, "c": A + B},
            {"a": B + C, "b": A + C, "c": A + B, "d": A + B},
        ]
        assert len(engine.computed) == 1 + 2 + 3 + 1
        assert len(engine.pool.warm()) == 4, "the earlier ones are released"

    run(test)


def test_waiting_covers_the_requests_own_and_the_lead_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warming, "AT_ONCE", 1)  # several are read at once, and come in any order

    async def test(service: KnowledgeService, engine: Engine) -> None:
        await add(service, a=A, tiny=SHORT)
        assert behind(service, engine) == {"a": [], "tiny": A}
        engine.computed.clear()
        await add(service, b=B, c=C)
        entries = {i: d.entry for i, d in service.catalogue.bases["base"].documents.items()}
        assert [entry for entry, _ in engine.computed] == [entries[i] for i in "bca"]
        await all_warm(service)
        assert behind(service, engine)["tiny"] == A + B

    run(test)


def test_nothing_stays_frozen_that_was_computed_behind_a_deleted_text() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        await add(service, a=A, b=B, c=C, d=D, e=E)
        engine.gate.clear()
        await service.delete("base", "b")
        assert not set(engine.frozen_behind()) & set(B), "at once, before anything is computed"
        engine.gate.set()
        await all_warm(service)
        assert behind(service, engine) == {"a": C + D, "c": A + D, "d": A + C, "e": A + C}
        leads = service.catalogue.bases["base"].leads.values()
        assert [lead.tolist() for lead in leads] == [A, C, D], "nothing is kept of it"

    run(test)


def test_what_no_other_was_computed_behind_is_deleted_alone() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        await add(service, a=A, b=B, c=C, d=D)
        computed = len(engine.computed)
        await service.delete("base", "d")
        await all_warm(service)
        assert len(engine.computed) == computed

    run(test)


def test_nothing_stays_frozen_that_was_computed_behind_a_replaced_text() -> None:
    """And what was replaced once is not soon computed behind again."""

    async def test(service: KnowledgeService, engine: Engine) -> None:
        await add(service, a=A, b=B, c=C, d=D)
        await add(service, a=E)
        assert not set(engine.frozen_behind()) & set(A)
        await all_warm(service)
        assert behind(service, engine) == {"b": C + D, "c": B + D, "d": B + C, "a": B + C}
        computed = len(engine.computed)
        await add(service, a=A)
        await all_warm(service)
        assert len(engine.computed) == computed + 1, "the others stay as they are"

    run(test)


def test_equal_text_and_other_metadata_change_no_context() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        content = {"a": A, "b": B, "c": C, "d": D}
        await add(service, **content)
        computed = len(engine.computed)
        for i in content:
            documents: Any = [{"id": i, "token_ids": content[i], "metadata": {"page": 2}}]
            await service.add("base", AddDocuments(documents=documents, wait=True))
        await all_warm(service)
        assert len(engine.computed) == computed
        assert (await service.document("base", "a")).metadata == {"page": 2}

    run(test)


def test_hits_go_on_where_the_context_changes() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        await add(service, a=A)
        entry = service.catalogue.bases["base"].documents["a"].entry
        engine.use(entry)
        assert (await service.document("base", "a")).hits == 1
        await add(service, b=B)
        assert (await service.document("base", "a")).hits == 1
        await service.save_uses()
        counted = service.store.load().uses
        assert counted[service.catalogue.bases["base"].documents["a"].entry][0] == 1
        assert entry not in counted

    run(test)


def test_bases_that_share_an_extra_key_share_no_context() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        await service.create_base(CreateBase(name="other", extra_key="base"))
        await add(service, a=A, b=B)
        await add(service, "other", c=C, d=D, a=A)
        await all_warm(service)
        assert behind(service, engine) == {"a": B, "b": A}
        assert behind(service, engine, "other") == {"c": D + A, "d": C + A, "a": C + D}

    run(test)


def test_without_siblings_documents_are_computed_alone() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        base, _ = await service.create_base(CreateBase(name="alone", context="none"))
        assert base.context == "none"
        for name, text in (("a", A), ("b", B), ("c", C)):
            await add(service, "alone", **{name: text})
        await service.delete("alone", "a")
        assert behind(service, engine, "alone") == {"b": [], "c": []}
        assert len(engine.computed) == 3

    run(test)


def test_creating_again_without_a_context_leaves_it_as_it_is() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        await service.create_base(CreateBase(name="alone", context="none"))
        for body in (CreateBase(name="alone"), CreateBase(name="base", context="siblings")):
            _, is_new = await service.create_base(body)
            assert not is_new
        assert (await service.base("alone")).context == "none"
        with pytest.raises(ConflictError, match="context"):
            await service.create_base(CreateBase(name="alone", context="siblings"))

    run(test)


def test_room_is_counted_with_the_contexts_that_follow() -> None:
    """The first document is one chunk alone, and two behind the second: a block more."""
    shape = Shape(BLOCK_SIZE, max_prompt_tokens=255, chunk_tokens=200)
    one, two = [*range(195)], [*range(300, 400)]
    context = (len(START) + 61) // BLOCK_SIZE * BLOCK_SIZE
    after = shape.num_blocks(context, 195) + shape.num_blocks(context, 100)
    assert after == 1 + shape.num_blocks(len(START), 195) + shape.num_blocks(context, 100)

    async def fits(service: KnowledgeService, engine: Engine) -> None:
        await add(service, one=one)
        await add(service, two=two)
        await all_warm(service)
        assert engine.pool.num_frozen == after

    async def does_not(service: KnowledgeService, engine: Engine) -> None:
        await add(service, one=one)
        with pytest.raises(NoRoomError, match=f"need {after} KV blocks"):
            await add(service, two=two)
        await all_warm(service)
        assert behind(service, engine) == {"one": []}

    run(fits, after, shape)
    run(does_not, after - 1, shape)


@pytest.mark.parametrize("method", ["put", "delete"])
def test_a_manifest_that_cannot_be_written_leaves_all_contexts(method: str) -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        await add(service, a=A, b=B)
        before = behind(service, engine)

        def refuse(*_: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        setattr(service.store, method, refuse)
        with pytest.raises(UnavailableError):
            await (add(service, c=C) if method == "put" else service.delete("base", "a"))
        await all_warm(service)
        assert behind(service, engine) == before

    run(test)


def test_a_document_whose_row_is_gone_fails_and_the_others_move() -> None:
    async def test(service: KnowledgeService, engine: Engine) -> None:
        await add(service, a=A, b=B, c=C, d=D)
        damage(service, "d")
        await service.delete("base", "a")
        await service.finish()
        page = await service.documents("base", None, 9)
        assert {d.id: d.status for d in page.data} == {"b": "warm", "c": "warm", "d": "failed"}
        assert not set(engine.frozen_behind()) & set(A)
        await add(service, d=E)
        await all_warm(service)
        assert behind(service, engine) == {"b": C + E, "c": B + E, "d": B + C}

    run(test)


# Across a restart.


def restarted(path: Path, shape: Shape = SHAPE) -> tuple[dict[str, list[int]], dict[str, str]]:
    """What each document is computed behind at a start, and the errors of others."""

    async def main() -> tuple[dict[str, list[int]], dict[str, str]]:
        engine = Engine()
        async with serving(engine, shape=shape, path=path) as service:
            await service.finish()
            page = await service.documents("base", None, 100)
            faulty = {d.id: str(d.error) for d in page.data if d.status == "failed"}
            documents = service.catalogue.bases["base"].documents
            assert len(engine.contexts) == len({d.entry for d in documents.values()}) - len(faulty)
            return behind(service, engine, faulty=faulty), faulty

    return asyncio.run(main())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A manifest of four documents, one of which was replaced."""
    path = tmp_path / "manifest.sqlite"

    async def fill() -> None:
        async with serving(Engine(), path=path) as service:
            await service.create_base(CreateBase(name="base"))
            await add(service, d=E, c=C, b=B, a=A)
            await add(service, c=D)

    asyncio.run(fill())
    return path


NOW = {"d": B + A, "b": E + A, "a": E + B, "c": E + B}


def rows(path: Path) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as sql:
        return sql.execute("SELECT rowid, * FROM documents").fetchall()


def test_a_restart_computes_what_was_there_and_writes_nothing(path: Path) -> None:
    before = rows(path)
    assert restarted(path) == (NOW, {})
    assert rows(path) == before


def test_after_a_crash_nothing_of_a_deleted_text_is_computed(path: Path, tmp_path: Path) -> None:
    """Between the manifest's transaction and the first thing that is released."""
    crashed = tmp_path / "crashed.sqlite"

    async def crash() -> None:
        async with serving(Engine(), path=path) as service:
            delete = service.store.delete

            def unplugged(*args: Any) -> None:
                delete(*args)
                shutil.copy(path, crashed)

            service.store.delete = unplugged  # type: ignore[method-assign]
            await service.delete("base", "d")

    asyncio.run(crash())
    with contextlib.closing(sqlite3.connect(crashed)) as sql:
        found = dict(sql.execute("SELECT id, context FROM documents").fetchall())
    written = np.frombuffer(found["a"], np.int32).tolist()
    assert written == START + B + D, "before a start sets it right"
    assert restarted(crashed) == ({"b": A + D, "a": B + D, "c": B + A}, {})


def test_a_lead_document_that_is_torn_is_replaced_by_the_next(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("UPDATE documents SET digest = x'00' WHERE id = 'd'")
    found, faulty = restarted(path)
    assert found == {"b": A + D, "a": B + D, "c": B + A}
    assert "torn" in faulty["d"]


@pytest.mark.parametrize("change", ["preamble = NULL", "context = 'both'", "extra_key = 'other'"])
def test_a_base_that_is_damaged_computes_nothing(tmp_path: Path, change: str) -> None:
    """A shorter preamble would be the beginning of what documents were computed behind."""
    path = tmp_path / "manifest.sqlite"

    async def fill() -> None:
        async with serving(Engine(), path=path) as service:
            await service.create_base(CreateBase(name="base", preamble="Read"))
            await add(service, a=A, b=B)

    asyncio.run(fill())
    with contextlib.closing(sqlite3.connect(path)) as sql, sql:
        sql.execute(f"UPDATE bases SET {change}")

    async def start() -> None:
        engine = Engine()
        async with serving(engine, path=path) as service:
            await service.finish()
            assert (await service.stats()).documents.failed == 2
            assert not engine.computed

    asyncio.run(start())


def test_another_rule_or_limit_moves_documents_at_the_next_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "SIBLING_TOKENS", 6)
    cut = {"d": B[:6] + A[:6], "b": E[:6] + A[:6], "a": E[:6] + B[:6], "c": E[:6] + B[:6]}
    assert restarted(path) == (cut, {})
    monkeypatch.undo()
    assert restarted(path) == (NOW, {})
    halved = Shape(BLOCK_SIZE, max_prompt_tokens=100, chunk_tokens=40)
    assert restarted(path, halved) == ({i: [] for i in NOW}, {})


def test_a_context_that_fits_no_prompt_any_more_is_a_fault(path: Path) -> None:
    _, faulty = restarted(path, Shape(BLOCK_SIZE, max_prompt_tokens=63, chunk_tokens=40))
    assert faulty.keys() == NOW.keys()
    assert all("prompts are too short" in error for error in faulty.values())


VERSION_1 = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE bases (
    name TEXT PRIMARY KEY, extra_key TEXT NOT NULL, preamble TEXT, metadata TEXT NOT NULL,
    created_at REAL NOT NULL);
INSERT INTO about VALUES ('version', '1');
INSERT INTO bases VALUES ('base', 'base', NULL, '{}', 1.0);
"""


@pytest.mark.parametrize("version", ["1", "damaged"])
def test_bases_of_a_manifest_of_version_1_go_on_computing_alone(
    tmp_path: Path, version: str
) -> None:
    old, path = tmp_path / "old.sqlite", tmp_path / "now.sqlite"

    async def fill() -> None:
        async with serving(Engine(), path=old) as service:
            await service.create_base(CreateBase(name="base", context="none"))
            await add(service, a=A, b=B, c=C)

    asyncio.run(fill())
    with contextlib.closing(sqlite3.connect(path)) as sql, sql:
        sql.executescript(VERSION_1)
        sql.execute("ATTACH ? AS now", (str(old),))
        for table in ("documents", "uses", "deleted"):  # as they were
            (create,) = sql.execute(
                "SELECT sql FROM now.sqlite_master WHERE name = ?", (table,)
            ).fetchone()
            sql.execute(create)
            sql.execute(f"INSERT INTO main.{table} SELECT * FROM now.{table}")
        sql.execute("UPDATE about SET value = ?", (version,))
    before = rows(path)
    for _ in range(2):
        assert restarted(path) == ({"a": [], "b": [], "c": []}, {})
    assert rows(path) == before

    async def go_on() -> None:
        async with serving(Engine(), path=path) as service:
            base, is_new = await service.create_base(CreateBase(name="base"))
            assert (base.context, is_new) == ("none", False)
            await add(service, d=D)
            await service.create_base(CreateBase(name="new"))
            assert (await service.base("new")).context == "siblings"

    asyncio.run(go_on())
    assert restarted(path) == ({i: [] for i in "abcd"}, {})
