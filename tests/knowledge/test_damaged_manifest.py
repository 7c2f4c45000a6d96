# SPDX-License-Identifier: Apache-2.0
"""Any value in any column of the manifest: the server starts, answers, and computes none."""

import asyncio
import contextlib
import itertools
import json
import math
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.knowledge import fake_engine
from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from vllm_segreuse.features.knowledge import rows
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.database import IN_MEMORY
from vllm_segreuse.features.knowledge.errors import ManifestError
from vllm_segreuse.features.knowledge.schemas import (
    MAX_METADATA_BYTES,
    AddDocuments,
    CreateBase,
    WarmDocuments,
)
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.features.knowledge.store import Store
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.serve.admin import make_app

SHAPE = Shape(BLOCK_SIZE, max_prompt_tokens=63, chunk_tokens=20)
CONTENT = {"a": [*range(20, 40)], "b": [*range(50, 59)]}
COLUMNS = {
    "about": ["name", "value"],
    "bases": ["name", "extra_key", "preamble", "metadata", "created_at", "context", "digest"],
    "documents": ["base", "id", "entry", "context", "tokens", "metadata", "digest"],
    "uses": ["entry", "hits", "last_used"],
    "deleted": ["base", "id"],
}
APP = make_app()


class Engine(FakeEngine):
    """Remembers what it was told to compute.

    Attributes:
        prompts: (extra key, tokens).
    """

    def __init__(self) -> None:
        super().__init__()
        self.prompts: set[tuple[str, tuple[int, ...]]] = set()

    async def compute(self, tokens: list[int], extra_key: str, order: FreezeOrder) -> bool:
        self.prompts.add((extra_key, tuple(tokens)))
        return await super().compute(tokens, extra_key, order)


serving = partial(fake_engine.serving, shape=SHAPE, poll_s=60)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[Any]]:
    """A manifest, and the prompts that its documents may cost."""
    path, engine = tmp_path_factory.mktemp("sound") / "manifest.sqlite", Engine()

    async def fill() -> None:
        async with serving(engine, path=path) as service:
            await service.create_base(CreateBase(name="base", extra_key="key", preamble="Read"))
            documents: Any = [
                {"id": i, "token_ids": ids, "metadata": {"page": 1}} for i, ids in CONTENT.items()
            ]
            await service.add("base", AddDocuments(documents=documents, wait=True))
            for entry in engine.pool.warm():
                engine.use(entry)

    asyncio.run(fill())
    return path, engine.prompts


BESIDE = Shape(BLOCK_SIZE, max_prompt_tokens=255, chunk_tokens=40)
TEXTS = {"a": [*range(100, 140)], "b": [*range(200, 233)], "c": [*range(300, 336)]}


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[Any]]:
    """A manifest of documents that are computed behind each other, and what they may cost when any
    of them are torn."""
    path, engine = tmp_path_factory.mktemp("beside") / "manifest.sqlite", Engine()

    async def fill(path: Path | str, ids: tuple[str, ...]) -> None:
        async with serving(engine, shape=BESIDE, path=path) as service:
            await service.create_base(CreateBase(name="base", extra_key="key", preamble="Read"))
            documents: Any = [{"id": i, "token_ids": TEXTS[i], "metadata": {}} for i in ids]
            await service.add("base", AddDocuments(documents=documents, wait=True))
            engine.pool.reset()

    asyncio.run(fill(path, tuple(TEXTS)))
    for count in (1, 2):
        for ids in itertools.combinations(TEXTS, count):
            asyncio.run(fill(IN_MEMORY, ids))
    return path, engine.prompts


def damage(path: Path, changes: list[tuple[tuple[str, str], Any]], loose: bool) -> None:
    """Put values where they do not belong; `loose`: also those that the tables would refuse."""
    with contextlib.closing(sqlite3.connect(path)) as sql, sql:
        for table in COLUMNS if loose else ():
            sql.execute(f"CREATE TABLE loose AS SELECT * FROM {table}")
            sql.execute(f"DROP TABLE {table}")
            sql.execute(f"ALTER TABLE loose RENAME TO {table}")
        for (table, column), value in changes:
            cast = "CAST(? AS TEXT)" if isinstance(value, Broken) else "?"
            with contextlib.suppress(sqlite3.IntegrityError):
                sql.execute(f"UPDATE {table} SET {column} = {cast} WHERE rowid = 1", (value,))


class Broken(bytes):
    """Text that is no UTF-8."""


async def ask_everything(service: KnowledgeService) -> Iterator[httpx.Response]:
    APP.state.service = service
    transport = httpx.ASGITransport(APP, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answers = [await client.get(path) for path in ("/knowledge-bases", "/stats")]
        for base in ("base", "other"):
            at = f"/knowledge-bases/{base}"
            answers += [
                await client.get(at),
                await client.get(f"{at}/documents"),
                await client.get(f"{at}/documents/a"),
                await client.post(f"{at}/warm", json={"wait": True}),
                await client.get(f"{at}/documents/a"),
                await client.get(f"{at}/documents"),
                await client.delete(f"{at}/documents/b"),
                await client.delete(at),
                await client.delete(at),
            ]
        return answers


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=40),
    st.binary(min_size=32, max_size=32),
    st.binary(max_size=9).map(Broken),
    st.sampled_from(
        [
            *("", "key", "other", "base", "a", "\0", "..", "{}", '{"k": NaN}', '{"k": 1e999}'),
            *('{"k": ' + "[" * 50_000, '{"k": ' + "[" * 900 + "]" * 900 + "}"),
            *('{"k": ' + "9" * 5000 + "}", '{"\\ud800": 1}', "x" * 600, "x" * 3_000_000),
            *(2**53 + 1, 253_402_300_800, 1e300, -1, b"\1\0\0\0" * 20, b"\xff" * 40, b"x" * 10**6),
        ]
    ),
)
ANY_COLUMN = st.sampled_from([(table, c) for table, columns in COLUMNS.items() for c in columns])


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(st.lists(st.tuples(ANY_COLUMN, VALUES), min_size=1, max_size=3), st.booleans())
@example([(("uses", "hits"), math.inf)], False)
@example([(("uses", "hits"), 2**63 - 1)], False)
@example([(("uses", "last_used"), 1e300)], False)
@example([(("bases", "created_at"), 1e300)], False)
@example([(("bases", "created_at"), None)], True)
@example([(("bases", "metadata"), '{"k": ' + "[" * 900 + "]" * 900 + "}")], False)
@example([(("documents", "metadata"), '{"k": NaN}')], False)
@example([(("documents", "base"), b"base")], False)
@example([(("bases", "name"), b"base")], False)
@example([(("about", "value"), None)], True)
def test_any_value_in_any_column_is_survived_and_never_computed(
    sound: tuple[Path, set[Any]],
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[tuple[str, str], Any]],
    loose: bool,
) -> None:
    survive(sound, SHAPE, tmp_path_factory, changes, loose)


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(st.lists(st.tuples(ANY_COLUMN, VALUES), min_size=1, max_size=3), st.booleans())
@example([(("documents", "tokens"), b"\1\0\0\0" * 20)], False)
@example([(("documents", "context"), b"\1\0\0\0" * 20)], True)
@example([(("bases", "preamble"), None)], False)
@example([(("bases", "context"), "none")], False)
def test_documents_behind_damaged_ones_are_computed_behind_sound_ones_only(
    beside: tuple[Path, set[Any]],
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[tuple[str, str], Any]],
    loose: bool,
) -> None:
    survive(beside, BESIDE, tmp_path_factory, changes, loose)


def survive(
    sound: tuple[Path, set[Any]],
    shape: Shape,
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[tuple[str, str], Any]],
    loose: bool,
) -> None:
    template, prompts = sound
    path = tmp_path_factory.mktemp("damaged") / "manifest.sqlite"
    shutil.copy(template, path)
    damage(path, changes, loose)

    async def test() -> None:
        engine = Engine()
        async with serving(engine, shape=shape, path=path) as service:
            answers = await ask_everything(service)
        wrong = [a for a in answers if not 200 <= a.status_code < 500]
        assert not wrong, [(a.request.url, a.text) for a in wrong]
        assert engine.prompts <= prompts, "something else was computed than was ever added"

    if any(table == "about" for (table, _), _ in changes):
        with contextlib.suppress(ManifestError):  # that it is of another version
            asyncio.run(test())
    else:
        asyncio.run(test())


def change(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as sql, sql:
        for statement in statements:
            sql.execute(statement)


def told(path: Path) -> tuple[Any, dict[str, Any]]:
    """The base and its documents as a server tells them."""

    async def tell() -> tuple[Any, dict[str, Any]]:
        async with serving(Engine(), path=path) as service:
            page = await service.documents("base", None, 100)
            return await service.base("base"), {d.id: d for d in page.data}

    return asyncio.run(tell())


@pytest.fixture
def path(sound: tuple[Path, set[Any]], tmp_path: Path) -> Path:
    return Path(shutil.copy(sound[0], tmp_path))


def test_what_is_not_damaged_is_as_it_was(path: Path) -> None:
    base, documents = told(path)
    assert (base.extra_key, base.preamble, base.hits) == ("key", "Read", 2)
    assert {i: (d.tokens, d.hits, d.error) for i, d in documents.items()} == {
        "a": (20, 1, None),
        "b": (9, 1, None),
    }


@pytest.mark.parametrize("column", ["entry", "context", "tokens", "metadata", "digest"])
@pytest.mark.parametrize("value", ["x'00'", "'x'", "7", "1.5", "CAST(x'ff' AS TEXT)"])
def test_one_damaged_document_leaves_the_others(path: Path, column: str, value: str) -> None:
    change(path, f"UPDATE documents SET {column} = {value} WHERE id = 'a'")
    _, documents = told(path)
    assert documents["a"].status == "failed"
    assert "torn" in documents["a"].error
    assert documents["b"].status in ("warm", "warming")


@pytest.mark.parametrize("column", ["base", "id", "entry"])
def test_a_key_of_another_type_is_not_the_key_that_it_looks_like(path: Path, column: str) -> None:
    change(path, f"UPDATE documents SET {column} = CAST({column} AS BLOB) WHERE id = 'a'")
    _, documents = told(path)
    assert documents["a"].status == "failed"


def test_a_row_of_one_base_moved_to_another_is_not_taken_for_its_own(path: Path) -> None:
    change(
        path,
        "INSERT INTO bases SELECT "
        "'other', extra_key, preamble, metadata, created_at, 'none', x'' FROM bases",
        "UPDATE documents SET base = 'other' WHERE id = 'a'",
    )

    async def test() -> None:
        async with serving(Engine(), path=path) as service:
            [moved] = (await service.documents("other", None, 9)).data
            assert (moved.id, moved.status) == ("a", "failed")

    asyncio.run(test())


@pytest.mark.parametrize("hits", ["9e999", "-3", "1e300", "'many'", "x'00'", "9223372036854775807"])
def test_counts_that_cannot_be_begin_again_at_none(path: Path, hits: str) -> None:
    change(path, f"UPDATE uses SET hits = {hits}, last_used = {hits} WHERE rowid = 1")
    base, documents = told(path)
    assert base.hits == 1, "the other document's"
    assert all(d.error is None for d in documents.values())


@pytest.mark.parametrize("seconds", ["1e300", "9e999", "-5", "'x'", "x'00'"])
def test_a_time_that_no_calendar_knows_is_no_time(path: Path, seconds: str) -> None:
    change(path, f"UPDATE bases SET created_at = {seconds}")
    assert told(path)[0].created_at.timestamp() == 0


@pytest.mark.parametrize("extra_key", ["x'6b6579'", "''", "CAST(x'6b00' AS TEXT)"])
def test_a_base_without_a_sound_extra_key_takes_nothing_until_it_is_made_anew(
    path: Path, extra_key: str
) -> None:
    change(path, f"UPDATE bases SET extra_key = {extra_key}")

    async def test() -> None:
        engine = Engine()
        async with serving(engine, path=path) as service:
            documents: Any = [{"id": "c", "token_ids": [1, 2]}]
            with pytest.raises(Exception, match="delete the base and make it anew"):
                await service.add("base", AddDocuments(documents=documents, wait=True))
            assert {d.status for d in (await service.documents("base", None, 9)).data} == {"failed"}
            assert engine.prompts == set()
            await service.delete_base("base")
            await service.create_base(CreateBase(name="base"))
            [added] = await service.add("base", AddDocuments(documents=documents, wait=True))
            assert added.status == "warm"

    asyncio.run(test())


def test_documents_of_a_damaged_base_are_not_computed_where_no_context_tells(
    tmp_path: Path,
) -> None:
    """Without a preamble, and with a tokenizer that begins with no token, they have no context that
    the base's could differ from."""
    path = tmp_path / "manifest.sqlite"

    async def fill() -> None:
        engine = Engine()
        engine.start = []
        async with serving(engine, path=path) as service:
            await service.create_base(CreateBase(name="base", extra_key="key"))
            documents: Any = [{"id": "a", "token_ids": CONTENT["a"]}]
            await service.add("base", AddDocuments(documents=documents, wait=True))
        assert engine.prompts, "a sound one is"

    async def restart() -> None:
        engine = Engine()
        engine.start = []
        async with serving(engine, path=path) as service:
            await service.warm("base", WarmDocuments(wait=True))
            assert [d.status for d in (await service.documents("base", None, 9)).data] == ["failed"]
        assert engine.prompts == set()

    asyncio.run(fill())
    change(path, "UPDATE bases SET extra_key = x'6b6579'")
    asyncio.run(restart())


def test_metadata_that_python_cannot_parse_for_its_depth_is_none() -> None:
    assert rows.to_metadata(b'{"k": ' + b"[" * 100_000) == {}


@pytest.mark.parametrize("key", ["x'610a'", "CAST(x'61ff' AS TEXT)", "7"])
def test_a_document_with_a_damaged_id_can_be_seen_and_deleted_for_good(
    path: Path, key: str
) -> None:
    change(path, f"UPDATE documents SET id = {key} WHERE id = 'a'")
    shown = next(i for i in told(path)[1] if i != "b")
    assert told(path)[1][shown].status == "failed"

    async def delete() -> None:
        async with serving(Engine(), path=path) as service:
            await service.delete("base", shown)

    asyncio.run(delete())
    assert [*told(path)[1]] == ["b"]


def test_more_than_a_document_can_have_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(
        path,
        "UPDATE documents SET tokens = zeroblob(300000000) WHERE id = 'a'",
        "UPDATE documents SET metadata = CAST(zeroblob(5000000) AS TEXT) WHERE id = 'b'",
    )
    store = Store(str(path), "model")
    sizes = {d.id: (d.tokens.nbytes, d.fault is None) for d in store.load().documents}
    store.close()
    assert sizes == {"a": (0, False), "b": (36, False)}


def test_all_metadata_that_a_request_may_set_is_read_and_little_more(path: Path) -> None:
    """As JSON in ASCII, which escapes all letters of these, it is longest."""
    most = MAX_METADATA_BYTES - len('{"": ""}')
    for longest in ("é" * (most // 2), "\U00010000" * (most // 4), "\1" * (most // 6) + "xx"):
        with contextlib.closing(Store(str(path), "model")) as store:
            [first, *_] = store.load().documents
            assert len(json.dumps({"": longest}, ensure_ascii=False).encode()) == most + 8
            store.put("key", [replace(first, metadata={"": longest})])
        assert told(path)[1]["a"].metadata == {"": longest}
    with contextlib.closing(sqlite3.connect(path)) as sql:
        query = f"SELECT length({rows.json_text('zeroblob(1000000)')})"
        assert sql.execute(query).fetchone() == (3 * MAX_METADATA_BYTES + 1,)


def test_values_at_the_ends_of_their_ranges_are_taken() -> None:
    last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
    assert [rows.to_time(value) for value in (0, 0.5, last)] == [0.0, 0.5, last]
    assert [rows.to_time(value) for value in (-1, last + 1, None, math.nan)] == [None] * 4
    assert [rows.to_hits(value) for value in (0, 1, 7.5, 2**53)] == [0, 1, 7, 2**53]
    beyond = (-1, 2**53 + 1, math.inf, -math.inf, math.nan, None)
    assert [rows.to_hits(value) for value in beyond] == [0] * 6
    assert rows.to_tokens(b"\1\0\0\0\2\0\0\0").tolist() == [1, 2]
    for torn in (None, b"", b"\1\0\0", b"\1\0\0\0\2"):
        none = rows.to_tokens(torn)
        assert (none.dtype, none.shape) == (np.int32, (0,))


@pytest.mark.parametrize(
    ("value", "as_text", "as_blob"),
    [
        ("'ab'", b"ab", None), ("'abc'", b"abc", None), ("'abcd'", b"abc", None),
        ("'é'", "é".encode(), None), ("7", b"7", None), ("NULL", None, None),
        ("x'6162'", b"ab", b"ab"), ("x'616263'", b"abc", None), ("x''", None, b""),
    ],
)  # fmt: skip
def test_what_is_too_large_is_cut_or_dropped_by_sqlite(
    value: str, as_text: bytes | None, as_blob: bytes | None
) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as sql:
        query = f"SELECT {rows.text('it', 2)}, {rows.blob('it', 2)} FROM (SELECT {value} AS it)"
        assert sql.execute(query).fetchone() == (as_text, as_blob)


@pytest.mark.parametrize("version", ["NULL", "x'00'", "'one'", "1.5"])
def test_a_version_that_is_no_number_is_mended(path: Path, version: str) -> None:
    damage(path, [], loose=True)
    change(path, f"UPDATE about SET value = {version}")
    assert told(path)[1].keys() == CONTENT.keys()
    with contextlib.closing(sqlite3.connect(path)) as sql:
        assert set(sql.execute("SELECT value FROM about")) == {("3",)}


def test_pages_that_are_damaged_are_a_sentence(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xaa" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(ManifestError, match=r"cannot use .*manifest\.sqlite.* malformed"):
        list(Store(str(path), "model").load().documents)
