# SPDX-License-Identifier: Apache-2.0
"""Values of the manifest as SQLite hands them out: any column may hold anything, of any size.

The expressions cut or drop what is too large before it is read; the functions make of what is left
a value of the right type and within its range.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from vllm_segreuse.features.knowledge.schemas import MAX_METADATA_BYTES, Metadata

MAX_TOKEN_BYTES = 256 * 2**20
"""Of one document: 64 million tokens."""

MAX_KEY_BYTES = 512
"""Of names, ids and extra keys."""

_MAX_JSON_BYTES = 3 * MAX_METADATA_BYTES
"""Escapes make six bytes of a character of two, and twelve of one of four."""

_MAX_TIME_S = 253_402_300_799
"""The last second of the year 9999, where `datetime` ends."""

_MAX_HITS = 2**53

_METADATA: TypeAdapter[dict[str, Any]] = TypeAdapter(Metadata)


def text(column: str, max_bytes: int = MAX_KEY_BYTES) -> str:
    """SQL: the bytes of a text, or of whatever stands for it, cut behind one byte too many."""
    return f"substr(CAST({column} AS BLOB), 1, {max_bytes + 1})"


def blob(column: str, max_bytes: int = MAX_TOKEN_BYTES) -> str:
    """SQL: a blob; NULL for anything else, and for one that is too large."""
    return (
        f"CASE WHEN typeof({column}) = 'blob' AND length({column}) <= {max_bytes} THEN {column} END"
    )


def json_text(column: str) -> str:
    """SQL: the bytes of metadata."""
    return text(column, _MAX_JSON_BYTES)


def number(column: str) -> str:
    """SQL: a number; NULL for anything else."""
    return f"CASE WHEN typeof({column}) IN ('integer', 'real') THEN {column} END"


def are_texts(*columns: str) -> str:
    """SQL: whether the columns hold text."""
    return " AND ".join(f"typeof({column}) = 'text'" for column in columns)


def to_text(value: bytes | None) -> str:
    """Text that can be shown; what is no UTF-8 is replaced."""
    return (value or b"").decode(errors="replace")


def to_tokens(value: bytes | None) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Token ids; none where they are torn."""
    if value is None or len(value) % 4:
        return np.empty(0, np.int32)
    return np.frombuffer(value, np.int32)


def to_metadata(value: bytes | None) -> dict[str, Any]:
    """Metadata that a request could have set, or none."""
    try:
        return _METADATA.validate_python(json.loads(to_text(value)))
    except (ValueError, RecursionError):
        return {}


def to_time(value: float | None) -> float | None:
    """Seconds since 1970 that a calendar knows."""
    return float(value) if value is not None and 0 <= value <= _MAX_TIME_S else None


def to_hits(value: float | None) -> int:
    """A count that can go on being counted."""
    if value is None or not math.isfinite(value) or not 0 <= value <= _MAX_HITS:
        return 0
    return int(value)
