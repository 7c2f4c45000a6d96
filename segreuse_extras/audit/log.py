# SPDX-License-Identifier: Apache-2.0
"""The audit log: one JSON object a line, rotated by size, readable by its owner alone."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any


class AuditLog(RotatingFileHandler):
    """A log that never raises once it is open.

    Args:
        path: of the file; rotated ones have `.1`, `.2`... behind it.
        max_bytes: a file is rotated before it is larger.
        files: rotated files that are kept.
        on_error: called instead of an error when a line could not be written.

    Raises:
        OSError: the file cannot be opened, or is another user's, who could read it.
    """

    def __init__(
        self, path: Path, max_bytes: int, files: int, on_error: Callable[[], None]
    ) -> None:
        self._on_error = on_error
        super().__init__(path, maxBytes=max_bytes, backupCount=files, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_private)  # type: ignore[return-value]

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        self.emit(logging.LogRecord("audit", logging.INFO, "", 0, text, None, None))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """The disk is full, or the folder has gone."""
        self._on_error()


def _private(path: str, flags: int) -> int:
    """Opens a file that nobody else can read; a file that is there already becomes so."""
    opened = os.open(path, flags, 0o600)
    found = os.fstat(opened)
    if stat.S_ISREG(found.st_mode):
        if found.st_uid != os.geteuid():
            os.close(opened)
            raise PermissionError(
                f"the file belongs to another user (uid {found.st_uid}), who could read it: remove "
                "it, or name another one"
            )
        os.fchmod(opened, 0o600)
    return opened


def path_of(path: str, engine: int) -> Path:
    """The file of one of several engines: each writes, and rotates, its own."""
    given = Path(path)
    return given if engine == 0 else given.with_name(f"{given.stem}-{engine}{given.suffix}")
