# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines that a command reads."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GZIP = b"\x1f\x8b"
"""What a compressed file begins with."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def json_lines(file: Path, error: type[ValueError]) -> Iterator[tuple[str, Any]]:
    """What each line holds, and where it is from ("FILE, line 3"); blank lines are skipped.

    Args:
        file: as UTF-8, with or without a byte-order mark; it may be compressed by gzip.
        error: raised, with one sentence, where the file cannot be read or a line is no JSON.
    """
    for where, line in lines_of(file, error):
        yield where, parsed(where, line, error)


def lines_of(file: Path, error: type[ValueError]) -> Iterator[tuple[str, str]]:
    """The same lines as they are."""
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if content.startswith(GZIP) else content).decode(
            "utf-8-sig"
        )
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as why:
        raise error(f"cannot read {file}: {why}") from None
    # Not by `splitlines`: text in JSON may hold other separators of lines.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{file}, line {number}", line


def parsed(where: str, line: str, error: type[ValueError]) -> Any:
    """What one line holds; `error` if it is no JSON, or has a text that no encoding knows."""
    try:
        value = json.loads(line)
        if _SURROGATE.search(line):  # most are halves of pairs, each of which is one character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise error(
            f"{where} holds half of a surrogate pair: its text was cut within a character"
        ) from None
    except (ValueError, RecursionError) as why:
        raise error(f"{where} is no JSON: {why}") from None
    return value
