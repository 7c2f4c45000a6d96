# SPDX-License-Identifier: Apache-2.0
"""Lines of logs of any length, compressed or not: one is in memory at a time."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.json_lines import GZIP, parsed

MOST_LINE_BYTES = 1 << 28
"""A longer line is no request."""

ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


class LogLines:
    """Files, and how much of them has been read.

    Attributes:
        total_bytes: of the files, as they are on the disk.
        read_bytes: of them so far.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        try:
            facts = {file: file.stat() for file in files}
        except OSError as error:
            raise LogError(f"cannot read {error.filename}: {error.strerror}") from None
        for file, fact in facts.items():
            if not stat.S_ISREG(fact.st_mode):
                raise LogError(
                    f"{file} is no regular file, and logs are read more than once: write it to one"
                )
        self.total_bytes = sum(fact.st_size for fact in facts.values())
        self.read_bytes = 0

    def parsed(self, left_out: LeftOut) -> Iterator[tuple[str, Any]]:
        """What each line holds, and where it is from ("FILE, line 3"); blank lines are skipped.

        Args:
            left_out: gets the lines that are no JSON.

        Raises:
            LogError: a file cannot be read.
        """
        done = 0
        for file in self.files:
            try:
                with file.open("rb") as raw:
                    is_packed = raw.peek(2)[:2] == GZIP
                    stream: Any = gzip.GzipFile(fileobj=raw) if is_packed else raw
                    for where, value in _values(file, stream, left_out):
                        self.read_bytes = done + raw.tell()
                        yield where, value
                    done += file.stat().st_size
            except OSError as error:
                raise LogError(f"cannot read {file}: {error}") from None
            self.read_bytes = done


def _values(file: Path, stream: IO[bytes], left_out: LeftOut) -> Iterator[tuple[str, Any]]:
    number = 0
    while True:
        number += 1
        where = f"{file}, line {number}"
        try:
            line = stream.readline(MOST_LINE_BYTES)
        except (EOFError, zlib.error) as error:
            left_out.refuse(where, LogError(f"{where}: the compressed file is cut off: {error}"))
            return
        if not line:
            return
        if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            left_out.refuse(where, LogError(f"{where} has more than {MOST_LINE_BYTES:,} bytes"))
            return
        if not line.strip():
            continue
        try:
            value = parsed(where, line.decode("utf-8-sig"), LogError)
        except UnicodeDecodeError as error:
            left_out.refuse(where, LogError(f"{where} is no JSON: {error}"))
        except LogError as error:
            left_out.refuse(where, error)
        else:
            yield where, value


def files_of(path: Path) -> list[Path]:
    """A file; or those of a folder that may hold a trace, in the order of their names.

    Raises:
        LogError: there is none.
    """
    try:
        if not path.is_dir():
            return [path]
    except OSError as error:  # it may not be looked at
        raise LogError(f"cannot read {path}: {error.strerror}") from None
    found = in_folder(path)
    if not found:
        raise LogError(f"{path} holds no file whose name ends with {', '.join(ENDINGS)}")
    return found


def in_folder(folder: Path) -> list[Path]:
    """Files of a folder that may hold a trace, or what belongs to one, in the order of their names.

    Raises:
        LogError: it cannot be read.
    """
    try:
        return sorted(file for file in folder.iterdir() if file.name.endswith(ENDINGS))
    except OSError as error:
        raise LogError(f"cannot read {folder}: {error.strerror}") from None
