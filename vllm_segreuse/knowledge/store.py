# SPDX-License-Identifier: Apache-2.0
"""The manifest: what was ingested, in SQLite, so that it survives a restart.

It holds token ids, never KV. Each document carries a digest of everything that decides what is
computed for it, the model included; a row whose digest does not fit (torn, edited, or written for
another model) is reported as faulty and never computed. One process at a time may use a file.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_segreuse.knowledge.errors import ManifestError

Tokens = npt.NDArray[np.int32]

IN_MEMORY = ":memory:"
_VERSION = "1"

_TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS bases (
    name TEXT PRIMARY KEY, extra_key TEXT NOT NULL, preamble TEXT, metadata TEXT NOT NULL,
    created_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    base TEXT NOT NULL, id TEXT NOT NULL, entry TEXT NOT NULL, context BLOB NOT NULL,
    tokens BLOB NOT NULL, metadata TEXT NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (base, id));
CREATE TABLE IF NOT EXISTS uses (entry TEXT PRIMARY KEY, hits INTEGER NOT NULL, last_used REAL);
CREATE TABLE IF NOT EXISTS deleted (base TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY (base, id));
"""


@dataclass
class BaseRecord:
    """A knowledge base as it was created."""

    name: str
    extra_key: str
    preamble: str | None
    metadata: dict[str, Any]
    created_at: float


@dataclass
class DocumentRecord:
    """A document as it was ingested.

    Attributes:
        context: tokens before it while it is computed.
        fault: why it must not be computed, or None.
    """

    base: str
    id: str
    context: Tokens
    tokens: Tokens
    metadata: dict[str, Any]
    entry: str
    fault: str | None = None


@dataclass
class Manifest:
    """All that a file holds."""

    bases: list[BaseRecord] = field(default_factory=list)
    documents: list[DocumentRecord] = field(default_factory=list)
    uses: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    """Hits and last use (seconds since 1970) by entry."""


def entry_name(extra_key: str, context: Tokens, tokens: Tokens) -> str:
    """What names equal KV: the same text behind the same context in the same namespace."""
    digest = hashlib.sha256()
    for part in (extra_key.encode(), context.tobytes(), tokens.tobytes()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


class Store:
    """One manifest, held open. Calls block; they must come one at a time.

    Args:
        path: the file, made if need be; `IN_MEMORY` for one that is forgotten.
        model: names the model and its tokenizer: rows written for another one are faulty.

    Raises:
        ManifestError: the file is no manifest, another process uses it, or it cannot be written.
    """

    def __init__(self, path: str, model: str) -> None:
        self._path = path
        self._model = model
        try:
            # Several threads may take turns.
            self._sql = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
            # What is torn need not be UTF-8; its digest tells, and the rest can still be read.
            self._sql.text_factory = lambda raw: raw.decode(errors="replace")
            self._sql.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._sql.execute("PRAGMA synchronous = FULL")
            self._sql.execute("BEGIN EXCLUSIVE")
            for statement in _TABLES.split(";"):
                self._sql.execute(statement)
            self._sql.execute("INSERT OR IGNORE INTO about VALUES ('version', ?)", (_VERSION,))
            self._sql.commit()
            (version,) = self._sql.execute("SELECT value FROM about WHERE name = 'version'")
        except (sqlite3.Error, ValueError) as error:
            raise ManifestError(
                f"cannot use {path!r} as the manifest of knowledge bases: {error}; if no other "
                "server uses it, restore it or move it away to begin with an empty one"
            ) from None
        if version != (_VERSION,):
            raise ManifestError(f"{path!r} is a manifest of version {version[0]}, not {_VERSION}")

    def load(self) -> Manifest:
        """Everything, with faults found."""
        manifest = Manifest()
        extra_keys = {}
        for row in self._sql.execute("SELECT * FROM bases ORDER BY name"):
            name, extra_key, preamble, metadata, created_at = row
            manifest.bases.append(
                BaseRecord(
                    str(name),
                    str(extra_key),
                    None if preamble is None else str(preamble),
                    _loads(metadata),
                    _number(created_at) or 0.0,
                )
            )
            extra_keys[name] = str(extra_key)
        for row in self._sql.execute("SELECT * FROM documents ORDER BY base, id"):
            if row[0] in extra_keys:
                manifest.documents.append(self._document(row, extra_keys[row[0]]))
        for entry, hits, last_used in self._sql.execute("SELECT * FROM uses"):
            manifest.uses[entry] = int(_number(hits) or 0), _number(last_used)
        return manifest

    def document(self, base: str, document_id: str) -> DocumentRecord | None:
        """One document, or None."""
        row = self._sql.execute(
            "SELECT * FROM documents WHERE base = ? AND id = ?", (base, document_id)
        ).fetchone()
        found = self._sql.execute("SELECT extra_key FROM bases WHERE name = ?", (base,)).fetchone()
        return None if row is None or found is None else self._document(row, str(found[0]))

    def add_base(self, base: BaseRecord) -> None:
        """Remember a new base."""
        values = (
            *(base.name, base.extra_key, base.preamble),
            *(json.dumps(base.metadata), base.created_at),
        )
        with self._sql:
            self._sql.execute("INSERT INTO bases VALUES (?, ?, ?, ?, ?)", values)
            self._sql.execute("DELETE FROM deleted WHERE base = ?", (base.name,))

    def delete_base(self, name: str) -> None:
        """Forget a base and its documents, but not that it was there."""
        with self._sql:
            self._sql.execute("DELETE FROM bases WHERE name = ?", (name,))
            self._sql.execute("DELETE FROM documents WHERE base = ?", (name,))
            self._sql.execute("DELETE FROM deleted WHERE base = ?", (name,))
            self._sql.execute("INSERT INTO deleted VALUES (?, '')", (name,))

    def put(self, extra_key: str, documents: Sequence[DocumentRecord]) -> None:
        """Remember documents of one base, all of them or none."""
        rows = [
            (
                *(d.base, d.id, d.entry, d.context.tobytes(), d.tokens.tobytes()),
                *(json.dumps(d.metadata), self._digest(extra_key, d)),
            )
            for d in documents
        ]
        with self._sql:
            self._sql.executemany(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", rows
            )
            self._sql.executemany(
                "DELETE FROM deleted WHERE base = ? AND id = ?", [(d.base, d.id) for d in documents]
            )

    def delete(self, base: str, document_id: str) -> None:
        """Forget a document, but not that it was there."""
        with self._sql:
            self._sql.execute(
                "DELETE FROM documents WHERE base = ? AND id = ?", (base, document_id)
            )
            self._sql.execute("INSERT OR IGNORE INTO deleted VALUES (?, ?)", (base, document_id))

    def was_deleted(self, base: str, document_id: str = "") -> bool:
        """Whether a base, or a document of it, was there once."""
        return bool(
            self._sql.execute(
                "SELECT 1 FROM deleted WHERE base = ? AND id = ?", (base, document_id)
            ).fetchone()
        )

    def save_uses(self, uses: Iterable[tuple[str, int, float | None]]) -> None:
        """Remember hits and last use of entries."""
        with self._sql:
            self._sql.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", uses)

    def forget_uses(self, entries: Iterable[str]) -> None:
        """Entries that no document has any more."""
        with self._sql:
            self._sql.executemany("DELETE FROM uses WHERE entry = ?", [(e,) for e in entries])

    def close(self) -> None:
        """Let the file go."""
        self._sql.close()

    def _document(self, row: tuple[Any, ...], extra_key: str) -> DocumentRecord:
        base, document_id, entry, context, tokens, metadata, digest = row
        record = DocumentRecord(
            base, document_id, _tokens(context), _tokens(tokens), _loads(metadata), str(entry)
        )
        if digest != self._digest(extra_key, record):
            record.fault = (
                "its entry in the manifest is torn, or was written for another model: add it again"
            )
        return record

    def _digest(self, extra_key: str, document: DocumentRecord) -> bytes:
        digest = hashlib.sha256()
        for part in (
            *(self._model.encode(), extra_key.encode(), document.base.encode()),
            *(document.id.encode(), document.entry.encode()),
            *(document.context.tobytes(), document.tokens.tobytes()),
            json.dumps(document.metadata).encode(),
        ):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()


def _tokens(blob: object) -> Tokens:
    if not isinstance(blob, bytes) or len(blob) % 4:
        return np.empty(0, np.int32)  # torn; the digest tells
    return np.frombuffer(blob, np.int32)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _loads(text: object) -> dict[str, Any]:
    try:
        value = json.loads(str(text))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
