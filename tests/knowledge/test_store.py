# SPDX-License-Identifier: Apache-2.0
"""The manifest: nothing torn, foreign or shared is ever taken for sound."""

import os
import shutil
import sqlite3
import stat
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_segreuse.features.knowledge.database import connect
from vllm_segreuse.features.knowledge.errors import ManifestError
from vllm_segreuse.features.knowledge.store import BaseRecord, DocumentRecord, Store, entry_name

CONTEXT, TOKENS = np.array([1], np.int32), np.arange(50, dtype=np.int32)


def record(document_id: str = "doc", base: str = "base") -> DocumentRecord:
    name = entry_name("key", CONTEXT, TOKENS)
    return DocumentRecord(base, document_id, CONTEXT, TOKENS, {"a": [1, 0.1]}, name)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "manifest.sqlite")
    store = Store(path, "model")
    store.add_base(BaseRecord("base", "key", None, {}, 1.0))
    store.put("key", [record()])
    store.close()
    return path


def reload(path: str, model: str = "model") -> DocumentRecord:
    store = Store(path, model)
    (found,) = store.load().documents
    assert store.document("key", "base", "doc").fault is None or found.fault
    store.close()
    return found


def test_what_was_put_comes_back(path: str) -> None:
    found = reload(path)
    assert found.fault is None
    assert np.array_equal(found.tokens, TOKENS)
    assert found.metadata == {"a": [1, 0.1]}


@pytest.mark.parametrize(
    "tear",
    [
        "UPDATE documents SET tokens = substr(tokens, 1, 100)",
        "UPDATE documents SET tokens = substr(tokens, 1, 99)",
        "UPDATE documents SET tokens = 'text'",
        "UPDATE documents SET tokens = CAST(x'ff00fe' AS TEXT)",
        "UPDATE documents SET entry = CAST(x'ff00fe' AS TEXT)",
        "UPDATE bases SET extra_key = 7",
        "UPDATE documents SET context = x'02000000'",
        "UPDATE documents SET entry = 'x'",
        "UPDATE documents SET metadata = '{'",
        "UPDATE documents SET digest = x'00'",
        "UPDATE documents SET id = 'doc', base = 'base', digest = 7",
        "UPDATE bases SET extra_key = 'theirs'",
    ],
)
def test_a_torn_row_is_told_apart(path: str, tear: str) -> None:
    with sqlite3.connect(path) as sql:
        sql.execute(tear)
    sql.close()
    assert "torn" in str(reload(path).fault)


@pytest.mark.parametrize(
    "tear",
    [
        "UPDATE bases SET created_at = 'x', metadata = CAST(x'ff' AS TEXT)",
        "UPDATE uses SET hits = 'x', last_used = CAST(x'ff' AS TEXT)",
    ],
)
def test_what_only_describes_a_row_may_be_torn(path: str, tear: str) -> None:
    store = Store(path, "model")
    store.save_uses([(record().entry, 3, 1.0)])
    store.close()
    with sqlite3.connect(path) as sql:
        sql.execute(tear)
    sql.close()
    store = Store(path, "model")
    manifest = store.load()
    found = list(manifest.documents)
    store.close()
    assert found[0].fault is None
    assert isinstance(manifest.bases[0].created_at, float)
    assert isinstance(manifest.uses[record().entry][0], int)


def test_a_row_of_another_model_is_told_apart(path: str) -> None:
    assert reload(path, "another").fault is not None


def test_a_document_without_its_base_is_left_out(path: str) -> None:
    with sqlite3.connect(path) as sql:
        sql.execute("DELETE FROM bases")
    sql.close()
    store = Store(path, "model")
    assert list(store.load().documents) == []
    assert store.document("key", "base", "doc") is not None, "but not of a base"
    store.close()


def test_what_is_no_manifest_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no database " * 1000)
    with pytest.raises(ManifestError, match=r"notes\.txt.*not a database"):
        Store(str(path), "model")
    assert path.read_text().startswith("no database"), "left as it was"
    with pytest.raises(ManifestError, match="No such file"):
        Store(str(tmp_path / "missing" / "manifest.sqlite"), "model")


def test_documents_of_earlier_versions_are_whole(path: str) -> None:
    """Versions 1 and 2 had no compressed documents; their digests fit as they are."""
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("ALTER TABLE documents DROP COLUMN compression")
        sql.execute("ALTER TABLE documents DROP COLUMN kept")
        sql.execute("UPDATE about SET value = '2' WHERE name = 'version'")
    with closing(Store(path, "model")) as store:
        [record] = store.load().documents
        assert (record.fault, record.compression, record.kept) == (None, None, None)


def test_a_manifest_of_another_version_is_refused(path: str) -> None:
    with sqlite3.connect(path) as sql:
        sql.execute("UPDATE about SET value = '99'")
    sql.close()
    with pytest.raises(ManifestError, match="version 99"):
        Store(path, "model")


def test_two_servers_cannot_share_one_manifest(path: str) -> None:
    first = Store(path, "model")
    first.load()
    with pytest.raises(ManifestError, match="locked"):
        Store(path, "model")
    first.close()


def test_it_remembers_what_was_deleted(path: str) -> None:
    store = Store(path, "model")
    assert not store.was_deleted("base", "doc")
    store.delete("base", "doc")
    assert store.was_deleted("base", "doc")
    assert not store.was_deleted("base", "other")
    store.put("key", [record()])
    assert not store.was_deleted("base", "doc")
    store.delete_base("base")
    assert store.was_deleted("base")
    assert list(store.load().documents) == []
    store.close()


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_the_file_and_its_journals_are_its_owners_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = Store(str(tmp_path / "manifest.sqlite"), "model")
        store.add_base(BaseRecord("base", "key", None, {}, 1.0))
        store.put("key", [record()])
        files = [*tmp_path.iterdir()]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        store.close()
    finally:
        os.umask(before)


@pytest.mark.parametrize("journal", ["-journal", "-wal", "-shm"])
def test_a_file_that_others_could_read_is_narrowed(
    path: str, journal: str, caplog: pytest.LogCaptureFixture
) -> None:
    if journal == "-wal":
        with sqlite3.connect(path) as sql:
            sql.execute("PRAGMA journal_mode = WAL")
        sql.close()
    Path(path + journal).touch()
    for file in (path, path + journal):
        os.chmod(file, 0o644)
    store = Store(path, "model")
    store.put("key", [record()])
    for file in Path(path).parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert "0600" in caplog.text
    store.close()
    assert reload(path).fault is None


def test_permissions_of_a_file_that_is_no_manifest_stay(tmp_path: Path) -> None:
    notes, other = tmp_path / "notes.txt", tmp_path / "other.sqlite"
    notes.write_text("no database " * 1000)
    with sqlite3.connect(other) as sql:
        sql.execute("CREATE TABLE addresses (name)")
    sql.close()
    for file, complaint in ((notes, "not a database"), (other, "a database of something else")):
        file.chmod(0o644)
        content = file.read_bytes()
        with pytest.raises(ManifestError, match=complaint):
            Store(str(file), "model")
        assert (stat.S_IMODE(file.stat().st_mode), file.read_bytes()) == (0o644, content)


def test_a_path_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(ManifestError, match="no regular file"):
            Store(str(path), "model")


def test_what_is_acknowledged_has_reached_the_disk(path: str, tmp_path: Path) -> None:
    with closing(connect(path)) as sql:
        assert sql.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
        assert not sql.in_transaction
    store = Store(path, "model")
    store.delete("base", "doc")
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for file in tmp_path.glob("manifest.sqlite*"):  # its journal, too
        shutil.copy(file, crashed)
    store.close()
    store = Store(str(crashed / "manifest.sqlite"), "model")
    assert store.was_deleted("base", "doc"), "committed before it is told"
    store.close()


def test_a_store_that_was_refused_holds_no_lock(path: str) -> None:
    with sqlite3.connect(path) as sql:
        sql.execute("UPDATE about SET value = '99'")
    with pytest.raises(ManifestError):
        Store(path, "model")
    sql.execute("UPDATE about SET value = '1'")
    sql.commit()
    sql.close()
    assert reload(path).fault is None


def test_all_documents_of_a_request_are_put_or_none(path: str) -> None:
    store = Store(path, "model")
    bad = record("bad")
    bad.id = 2**80  # type: ignore[assignment]
    with pytest.raises(Exception, match=r".+"):
        store.put("key", [record("new"), bad])
    assert [d.id for d in store.load().documents] == ["doc"]
    store.close()


def test_uses_go_with_the_last_document_of_their_entry(path: str) -> None:
    store = Store(path, "model")
    entry = record().entry
    store.put("key", [record("twin")])
    store.save_uses([(entry, 3, 1.0)])
    store.delete("base", "doc")
    store.forget_uses([entry])
    assert store.load().uses == {entry: (3, 1.0)}
    store.delete("base", "twin")
    store.forget_uses([entry])
    assert store.load().uses == {}
    store.close()


def test_an_entry_is_named_by_all_that_decides_its_kv() -> None:
    other = np.array([2], np.int32)
    names = {
        entry_name("key", CONTEXT, TOKENS),
        entry_name("key2", CONTEXT, TOKENS),
        entry_name("key", other, TOKENS),
        entry_name("key", CONTEXT, TOKENS[1:]),
        # The same bytes, divided otherwise.
        entry_name("key", np.concatenate((CONTEXT, TOKENS[:1])), TOKENS[1:]),
    }
    assert len(names) == 5
    assert ":" not in "".join(names), "orders to freeze are divided by colons"


def test_a_base_made_anew_has_none_of_the_documents_of_before(path: str) -> None:
    with sqlite3.connect(path) as sql:
        sql.execute("DELETE FROM bases")
    sql.close()
    store = Store(path, "model")
    store.add_base(BaseRecord("base", "key", None, {}, 1.0))
    assert list(store.load().documents) == []
    store.close()


def test_ten_thousand_deletions_are_remembered(path: str) -> None:
    with closing(sqlite3.connect(path)) as sql, sql:
        rows = [(f"of long ago {number}",) for number in range(9_999)]
        sql.executemany("INSERT INTO deleted VALUES ('base', ?)", rows)
    with closing(Store(path, "model")) as store:
        store.delete("base", "doc")
        assert store.was_deleted("base", "of long ago 0")
        store.delete("base", "another")
        assert not store.was_deleted("base", "of long ago 0")
        assert store.was_deleted("base", "of long ago 1")
        assert store.was_deleted("base", "doc")


# What was deleted.

SECRET = np.arange(70_000, 70_900, dtype=np.int32)


def left_of(secret: np.ndarray, folder: Path) -> int:
    """How many pieces of 16 tokens are in any file of a folder."""
    content = b"".join(file.read_bytes() for file in folder.iterdir())
    return sum(secret[i : i + 16].tobytes() in content for i in range(0, len(secret) - 16, 16))


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite as it is by default, which leaves what was deleted where it is."""
    connect = sqlite3.connect

    def connected(*given: Any, **named: Any) -> sqlite3.Connection:
        sql = connect(*given, **named)
        sql.execute("PRAGMA secure_delete = OFF")
        return sql

    monkeypatch.setattr(sqlite3, "connect", connected)


def secret_record(document_id: str = "secret", tokens: np.ndarray = SECRET) -> DocumentRecord:
    name = entry_name("key", CONTEXT, tokens)
    return DocumentRecord("base", document_id, CONTEXT, tokens, {}, name)


def with_siblings(document_id: str, context: np.ndarray) -> DocumentRecord:
    """One that was computed behind the text of others."""
    name = entry_name("key", context, TOKENS)
    return DocumentRecord("base", document_id, context, TOKENS, {}, name)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("how", ["deleted", "replaced", "with its base"])
@pytest.mark.usefixtures("forgetful")
def test_no_file_has_the_text_of_a_document_that_is_gone(path: str, how: str, closes: bool) -> None:
    """Neither the manifest nor its journal; while it is open, too, as after a kill. Others were
    computed behind it, and have its text in their contexts."""
    folder = Path(path).parent
    store = Store(path, "model")
    store.put("key", [secret_record(), with_siblings("sibling", SECRET[:512])])
    store.save_uses([(secret_record().entry, 3, 1.0)])
    assert left_of(SECRET, folder) > 50
    moved = with_siblings("sibling", CONTEXT)
    if how == "deleted":
        store.delete("base", "secret", "key", [moved])
    elif how == "replaced":
        store.put("key", [secret_record(tokens=TOKENS), moved])
    else:
        store.delete_base("base")
    store.forget_uses([secret_record().entry])
    if closes:
        store.close()
    assert left_of(SECRET, folder) == 0
    assert secret_record().entry.encode() not in Path(path).read_bytes()
    store.close()


@pytest.mark.usefixtures("forgetful")
def test_what_an_earlier_version_has_left_is_gone_once_the_manifest_was_opened(path: str) -> None:
    folder = Path(path).parent
    store = Store(path, "model")
    store.put("key", [secret_record()])
    store.close()
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("PRAGMA user_version = 0")
        sql.execute("DELETE FROM documents WHERE id = 'secret'")
        sql.commit()
    assert left_of(SECRET, folder) > 50
    store = Store(path, "model")
    assert left_of(SECRET, folder) == 0
    assert [found.id for found in store.load().documents] == ["doc"]
    store.close()
    assert reload(path).fault is None


def test_a_manifest_that_cannot_be_written_anew_is_used_all_the_same(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("PRAGMA user_version = 0")
    connect = sqlite3.connect

    class Full(sqlite3.Connection):
        def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
            if statement == "VACUUM":
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(statement, *given)

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Full))
    assert reload(path).fault is None
    assert "disk is full" in caplog.text
    monkeypatch.setattr(sqlite3, "connect", connect)
    caplog.clear()
    assert reload(path).fault is None
    assert not caplog.text


def test_counts_of_documents_that_are_gone_do_not_outlive_a_restart(path: str) -> None:
    """A crash came between the deletion and their removal."""
    store = Store(path, "model")
    store.put("key", [secret_record()])
    entries = [secret_record().entry, record().entry]
    store.save_uses([(entry, 3, 1.0) for entry in entries])
    store.delete("base", "secret", "key")
    store.close()
    store = Store(path, "model")
    assert store.load().uses.keys() == {record().entry}
    store.close()
