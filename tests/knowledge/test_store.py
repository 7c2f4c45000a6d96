# SPDX-License-Identifier: Apache-2.0
"""The manifest: nothing torn, foreign or shared is ever taken for sound."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from vllm_segreuse.knowledge.errors import ManifestError
from vllm_segreuse.knowledge.store import BaseRecord, DocumentRecord, Store, entry_name

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
