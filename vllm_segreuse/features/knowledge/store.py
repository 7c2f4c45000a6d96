# SPDX-License-Identifier: Apache-2.0
"""The manifest: what was ingested, in SQLite, so that it survives a restart.

It holds token ids, never KV. Each document carries a digest of everything that decides what is
computed for it, the model included; a row whose digest does not fit (torn, edited, or written for
another model) is reported as faulty and never computed. Counts and times that cannot be are taken
for none. One process at a time may use a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_segreuse.features.knowledge.compression import CompressionSettings
from vllm_segreuse.features.knowledge.database import connect, overwrites_deleted, usable
from vllm_segreuse.features.knowledge.rows import (
    are_texts,
    blob,
    json_text,
    number,
    text,
    to_hits,
    to_metadata,
    to_text,
    to_time,
    to_tokens,
)
from vllm_segreuse.features.knowledge.schemas import MAX_PREAMBLE_CHARS, Context, CreateBase

logger = logging.getLogger("vllm.segreuse")

Tokens = npt.NDArray[np.int32]

_ENTRY = re.compile(r"[0-9a-f]{32}")

MAX_DELETED = 10_000
"""Deletions that are remembered, so that the same again is no error."""

_SELECT_BASES = (
    f"SELECT {are_texts('name', 'extra_key', 'context')}, {text('name')}, {text('extra_key')}, "
    f"{text('preamble', 4 * MAX_PREAMBLE_CHARS)}, {json_text('metadata')}, {number('created_at')}, "
    f"{text('context')}, {blob('digest', 32)} FROM bases ORDER BY name"
)
_SELECT_DOCUMENT = (
    f"SELECT {are_texts('base', 'id', 'entry')}, {text('base')}, {text('id')}, {text('entry')}, "
    f"{blob('context')}, {blob('tokens')}, {json_text('metadata')}, {blob('digest', 32)}, "
    f"{text('compression')}, {blob('kept')} FROM documents"
)
# In the order in which they were added: a row keeps its place while its text is the same.
_SELECT_DOCUMENTS = f"{_SELECT_DOCUMENT} ORDER BY rowid"
_COLUMNS = "base, id, entry, context, tokens, metadata, digest, compression, kept"
_OF_KEY = "WHERE base = ? AND id = ?"
_UPDATE_DOCUMENT = (
    "UPDATE documents SET entry = ?, context = ?, tokens = ?, metadata = ?, digest = ?, "
    "compression = ?, kept = ? " + _OF_KEY
)
_SELECT_USES = (
    f"SELECT {text('entry')}, {number('hits')}, {number('last_used')} FROM uses "
    f"WHERE {are_texts('entry')}"
)


@dataclass
class BaseRecord:
    """A knowledge base as it was created.

    Attributes:
        created_at: seconds since 1970.
        fault: why nothing may be computed for it, or None.
    """

    name: str
    extra_key: str
    preamble: str | None
    metadata: dict[str, Any]
    created_at: float
    context: Context = "none"
    fault: str | None = None


@dataclass
class DocumentRecord:
    """A document as it was ingested.

    Attributes:
        context: tokens before it while it is computed.
        fault: why it must not be computed, or None.
        compression: None: all of its KV is kept.
        kept: positions of the tokens that are kept, ascending; None: they are not chosen yet.
    """

    base: str
    id: str
    context: Tokens
    tokens: Tokens
    metadata: dict[str, Any]
    entry: str
    fault: str | None = None
    compression: CompressionSettings | None = None
    kept: Tokens | None = None


class Manifest(NamedTuple):
    """All that a file holds.

    Attributes:
        documents: read one at a time, since their tokens may be many.
        uses: hits and last use (seconds since 1970) by entry.
    """

    bases: list[BaseRecord]
    documents: Iterator[DocumentRecord]
    uses: dict[str, tuple[int, float | None]]


def entry_name(
    extra_key: str, context: Tokens, tokens: Tokens, compression: CompressionSettings | None = None
) -> str:
    """What names equal KV: the same text behind the same context in the same namespace, compressed
    in the same way."""
    how = [] if compression is None else [compression.encode().encode()]
    return _digest(extra_key.encode(), context.tobytes(), tokens.tobytes(), *how).hex()[:32]


def is_entry(name: str) -> bool:
    """Whether a name is one that `entry_name` may have made."""
    return bool(_ENTRY.fullmatch(name))


def digest_of(tokens: Tokens) -> bytes:
    """Equal for equal tokens."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


class Store:
    """One manifest, held open. Calls block; they must come one at a time.

    Args:
        path: the file, made if need be; `database.IN_MEMORY` for one that is forgotten.
        model: names the model and its tokenizer: rows written for another one are faulty.

    Raises:
        ManifestError: the file is no manifest, another process uses it, or it cannot be written.
    """

    def __init__(self, path: str, model: str) -> None:
        self._path = path
        self._model = model
        self._sql = connect(path)

    # Reading all of it.

    def load(self) -> Manifest:
        """Everything, with faults found.

        Raises:
            ManifestError: the file is damaged so that SQLite cannot read it.
        """
        with usable(self._path):
            bases = [self._base(row) for row in self._sql.execute(_SELECT_BASES)]
            uses = {
                to_text(entry): (to_hits(hits), to_time(last_used))
                for entry, hits, last_used in self._sql.execute(_SELECT_USES)
            }
        return Manifest(bases, self._documents({base.name: base.extra_key for base in bases}), uses)

    def _base(self, row: tuple[Any, ...]) -> BaseRecord:
        are_sound, name, extra_key, preamble, metadata, created_at, context, digest = row
        base = BaseRecord(
            to_text(name),
            to_text(extra_key),
            None if preamble is None else to_text(preamble),
            to_metadata(metadata),
            to_time(created_at) or 0.0,
        )
        try:
            body = CreateBase.model_validate(
                {"name": base.name, "extra_key": base.extra_key, "preamble": base.preamble}
                | {"context": to_text(context)}
            )
            base.context = body.context or base.context
        except ValueError:
            are_sound = False
        # Documents that are computed alone carry the whole of their base's context, which tells.
        if base.context != "none" and digest != _base_digest(base):
            are_sound = False
        if not are_sound:
            base.fault = "its base in the manifest is damaged: delete the base and make it anew"
        return base

    def _documents(self, extra_keys: dict[str, str]) -> Iterator[DocumentRecord]:
        left_out = 0
        with usable(self._path):
            for row in self._sql.execute(_SELECT_DOCUMENTS):
                base = to_text(row[1])
                if base in extra_keys:
                    yield self._document(row, extra_keys[base])
                else:
                    left_out += 1
        if left_out:
            logger.warning(
                "segment reuse: %s: left out documents whose base is gone: %d", self._path, left_out
            )

    def _document(self, row: tuple[Any, ...], extra_key: str) -> DocumentRecord:
        are_texts, base, document_id, entry, context, tokens, metadata, digest, how, kept = row
        record = DocumentRecord(
            *(to_text(base), to_text(document_id), to_tokens(context), to_tokens(tokens)),
            *(to_metadata(metadata), to_text(entry)),
            compression=CompressionSettings.decode(to_text(how)),
            kept=None if kept is None else to_tokens(kept),
        )
        if not are_texts or not len(record.tokens) or digest != self._digest(extra_key, record):
            record.fault = (
                "its entry in the manifest is torn, or was written for another model: add it again"
            )
        return record

    # Requests.

    def document(self, extra_key: str, base: str, document_id: str) -> DocumentRecord | None:
        """One document of a base with this extra key, or None."""
        key = (base, document_id)
        row = self._sql.execute(f"{_SELECT_DOCUMENT} {_OF_KEY}", key).fetchone()
        return None if row is None else self._document(row, extra_key)

    def keep(self, extra_key: str, base: str, document_id: str, entry: str, kept: Tokens) -> None:
        """Remember which tokens of a compressed document are kept, unless it has changed."""
        record = self.document(extra_key, base, document_id)
        if record is None or record.fault is not None or record.entry != entry:
            return
        if record.kept is None or not np.array_equal(record.kept, kept):
            self.put(extra_key, [replace(record, kept=kept)])

    def add_base(self, base: BaseRecord) -> None:
        """Remember a new base."""
        values = (
            *(base.name, base.extra_key, base.preamble),
            *(json.dumps(base.metadata), base.created_at, base.context),
            _base_digest(base),
        )
        with self._sql:
            self._sql.execute("DELETE FROM documents WHERE base = ?", (base.name,))  # of none
            self._sql.execute("INSERT INTO bases VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            self._sql.execute("DELETE FROM deleted WHERE base = ?", (base.name,))

    def delete_base(self, name: str) -> None:
        """Forget a base and its documents, but not that it was there."""
        overwrites_deleted(self._sql)
        with self._sql:
            self._delete("bases", name=name)
            self._delete("documents", base=name)
            self._sql.execute("DELETE FROM deleted WHERE base = ?", (name,))
            self._bury(name, "")

    def put(self, extra_key: str, documents: Iterable[DocumentRecord]) -> None:
        """Remember documents of one base, all of them or none.

        Those whose text is new, or has changed, go behind all others.

        Args:
            documents: taken one at a time, since their tokens may be many.
        """
        overwrites_deleted(self._sql)
        with self._sql:
            self._put(extra_key, documents)

    def delete(
        self,
        base: str,
        document_id: str,
        extra_key: str = "",
        moved: Iterable[DocumentRecord] = (),
    ) -> None:
        """Forget a document, but not that it was there.

        Args:
            extra_key: of the base.
            moved: other documents of the base that change with it, as in `put`.
        """
        overwrites_deleted(self._sql)
        with self._sql:
            self._put(extra_key, moved)
            self._delete("documents", base=base, id=document_id)
            self._bury(base, document_id)

    def _put(self, extra_key: str, documents: Iterable[DocumentRecord]) -> None:
        for document in documents:
            key, tokens = (document.base, document.id), document.tokens.tobytes()
            values = (
                *(document.entry, document.context.tobytes(), tokens),
                *(json.dumps(document.metadata), self._digest(extra_key, document)),
                "" if document.compression is None else document.compression.encode(),
                None if document.kept is None else document.kept.tobytes(),
            )
            self._sql.execute(f"DELETE FROM documents {_OF_KEY} AND tokens != ?", (*key, tokens))
            if not self._sql.execute(_UPDATE_DOCUMENT, (*values, *key)).rowcount:
                self._sql.execute(
                    f"INSERT INTO documents ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*key, *values),
                )
            self._sql.execute(f"DELETE FROM deleted {_OF_KEY}", key)

    def was_deleted(self, base: str, document_id: str = "") -> bool:
        """Whether a base, or a document of it, was there once, `MAX_DELETED` deletions ago."""
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
        """Forget hits and last use of those entries that no document has any more."""
        with self._sql:
            self._sql.executemany(
                "DELETE FROM uses WHERE entry = ? "
                "AND NOT EXISTS (SELECT 1 FROM documents WHERE documents.entry = uses.entry)",
                [(entry,) for entry in entries],
            )

    def close(self) -> None:
        """Let the file go."""
        self._sql.close()

    def _delete(self, table: str, **keys: str) -> None:
        where = " AND ".join(f"{column} = ?" for column in keys)
        if self._sql.execute(f"DELETE FROM {table} WHERE {where}", (*keys.values(),)).rowcount:
            return
        # A damaged key is shown otherwise than it is stored.
        select = f"SELECT rowid, {', '.join(map(text, keys))} FROM {table}"
        shown = [
            (row,)
            for row, *found in self._sql.execute(select)
            if [*map(to_text, found)] == [*keys.values()]
        ]
        self._sql.executemany(f"DELETE FROM {table} WHERE rowid = ?", shown)

    def _bury(self, base: str, document_id: str) -> None:
        self._sql.execute("INSERT OR IGNORE INTO deleted VALUES (?, ?)", (base, document_id))
        self._sql.execute(
            "DELETE FROM deleted WHERE rowid <= (SELECT max(rowid) FROM deleted) - ?",
            (MAX_DELETED,),
        )

    def _digest(self, extra_key: str, document: DocumentRecord) -> bytes:
        how = document.compression
        return _digest(
            *(self._model.encode(), extra_key.encode(), document.base.encode()),
            *(document.id.encode(), document.entry.encode()),
            *(document.context.tobytes(), document.tokens.tobytes()),
            json.dumps(document.metadata).encode(),
            *([] if how is None else [how.encode().encode()]),
            *([] if document.kept is None else [b"kept", document.kept.tobytes()]),
        )


def _base_digest(base: BaseRecord) -> bytes:
    preamble = json.dumps(base.preamble)
    return _digest(*(part.encode() for part in (base.name, base.extra_key, preamble, base.context)))


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
