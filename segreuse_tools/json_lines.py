# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines that a command reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(file: Path, error: type[ValueError]) -> Iterator[tuple[str, Any]]:
    """What each line holds, and where it is from ("FILE, line 3"); blank lines are skipped.

    Args:
        file: as UTF-8.
        error: raised, with one sentence, where the file cannot be read or a line is no JSON.
    """
    for where, line in lines_of(file, error):
        yield where, parsed(where, line, error)


def lines_of(file: Path, error: type[ValueError]) -> Iterator[tuple[str, str]]:
    """The same lines as they are."""
    try:
        # Not by `splitlines`: text in JSON may hold other separators of lines.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as why:
        raise error(f"cannot read {file}: {why}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{file}, line {number}", line


def parsed(where: str, line: str, error: type[ValueError]) -> Any:
    """What one line holds; `error` if it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as why:
        raise error(f"{where} is no JSON: {why}") from None
