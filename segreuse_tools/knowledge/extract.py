# SPDX-License-Identifier: Apache-2.0
"""Text of files and folders, ready to become the documents of a knowledge base.

A document's id is the file's path relative to the folder that was named (the file's name if it was
named itself), so that adding the same folder again, from anywhere, changes what changed and nothing
else. A line of a .jsonl file is a document of its own: `notes.jsonl#7`, unless it has an id.

Files may be anybody's. They are parsed in a process of its own (`parsing.py`), whose memory is
limited and which is killed if it takes too long. Only regular files are opened, and below a folder
only those that lie in it: a link to one is read, a link out of the folder is refused, and links to
folders are not followed.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from segreuse_tools.knowledge import parsing
from segreuse_tools.knowledge.parsing import PARSERS, Text

__all__ = ["ExtractError", "Extractor", "Limits", "Source", "Text", "find_sources"]


class ExtractError(ValueError):
    """No document can be made of a file; the message names it and the cause."""


class Limits(NamedTuple):
    """What one file may cost.

    Attributes:
        max_bytes: size of the file, and of the text in it.
        max_pages: of a PDF.
        max_seconds: for reading and parsing it.
        max_memory_bytes: address space of the process that parses.
    """

    max_bytes: int = 64 * 2**20
    max_pages: int = 5000
    max_seconds: float = 60.0
    max_memory_bytes: int = 2 * 2**30


class Source(NamedTuple):
    """A file, the id its document gets, and the folder in which it must lie, if one was named."""

    path: Path
    id: str
    folder: Path | None = None


def find_sources(paths: Iterable[Path], problems: list[str] | None = None) -> list[Source]:
    """The files that `paths` (files, and folders with all below them) name, in a stable order.

    Folders give the files whose suffix is known. Hidden ones are left out, and links to folders are
    not followed.

    Args:
        problems: gets a sentence about each path or folder that is left out; None: the first one
            is raised.

    Raises:
        ExtractError: a path does not exist, a named file is of an unknown kind, a folder cannot be
            read or holds no file of a known kind, or two different files would get the same id.
    """

    def refuse(problem: str) -> None:
        if problems is None:
            raise ExtractError(problem)
        problems.append(problem)

    found: dict[str, Source] = {}
    for path in paths:
        for source in _sources(path, refuse):
            other = found.setdefault(source.id, source)
            if os.path.realpath(other.path) != os.path.realpath(source.path):
                refuse(
                    f"{other.path} and {source.path} would both become the document "
                    f"{source.id!r}: name the folder above them"
                )
    return list(found.values())


def _sources(path: Path, refuse: Callable[[str], None]) -> Iterator[Source]:
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        refuse(f"{path} does not exist")
        return
    except OSError as error:
        refuse(f"{path}: {error.strerror}")
        return
    if is_folder:
        yield from _below(path, refuse)
    elif path.suffix.lower() in PARSERS:
        yield Source(path, path.name)
    else:
        refuse(f"{path} is no {_KINDS} file")


def _below(folder: Path, refuse: Callable[[str], None]) -> Iterator[Source]:
    unread: list[OSError] = []
    empty = True
    for directory, folders, files in os.walk(folder, onerror=unread.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.suffix.lower() in PARSERS:
                empty = False
                yield Source(path, path.relative_to(folder).as_posix(), folder)
    for error in unread:
        refuse(f"{error.filename}: {error.strerror}")
    if empty and not unread:
        refuse(f"{folder} holds no {_KINDS} file")


_KINDS = "/".join(PARSERS)


class Extractor:
    """Reads files within limits, by a process that is started when it is needed.

        with Extractor() as extractor:
            texts = extractor.read(source)

    Args:
        limits: for each file.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def read(self, source: Source) -> list[Text]:
        """The documents of one file.

        Raises:
            ExtractError: the file cannot be read or parsed, holds no text, or exceeds a limit.
        """
        file = _open(source, self._limits.max_bytes)
        try:
            line = self._ask(source, file)
        except BaseException:
            self.close()  # whatever it is doing
            raise
        finally:
            os.close(file)
        try:
            answer = json.loads(line.decode(errors="surrogatepass"))
        except RecursionError:
            answer = {"error": " cannot be parsed: its metadata is nested too deeply"}
        if "memory" in answer:
            self.close()
            limit = self._limits.max_memory_bytes
            raise ExtractError(
                f"{source.path} needs more than {limit} bytes of memory to be parsed: raise "
                "--max-memory or split it"
            )
        if "error" in answer:
            raise ExtractError(f"{source.path}{answer['error']}")
        return [Text(*text) for text in answer["texts"]]

    def _ask(self, source: Source, file: int) -> bytes:
        connection = self._connection or self._start()
        limits = self._limits
        request = parsing.Request(
            source.path.suffix.lower(),
            source.id,
            limits.max_bytes,
            limits.max_pages,
            limits.max_seconds,
        )
        deadline = time.monotonic() + limits.max_seconds
        answer = bytearray()
        try:
            socket.send_fds(connection, [json.dumps(request).encode()], [file])
            while not answer.endswith(b"\n"):
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
                part = connection.recv(1 << 20)
                if not part:
                    raise ExtractError(f"{source.path} makes the parser crash: leave it out")
                answer += part
        except TimeoutError:
            raise ExtractError(
                f"{source.path} takes more than {limits.max_seconds:g} seconds to be parsed: raise "
                "--max-seconds or split it"
            ) from None
        except OSError as error:
            raise ExtractError(f"{source.path} makes the parser crash ({error})") from error
        return bytes(answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            # As a script: this package need not be found, and nothing beside the script is.
            script = [sys.executable, "-P", parsing.__file__]
            self._process = subprocess.Popen(
                [*script, str(theirs.fileno()), str(self._limits.max_memory_bytes)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection = ours
        return ours


def _open(source: Source, max_bytes: int) -> int:
    """A descriptor of a regular file that is not too large and lies where it was found."""
    path = source.path
    try:
        # Looked at before it is opened, since opening alone moves some devices; and again after it.
        _check_kind(path, os.stat(path))
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_opened(source, file, max_bytes)
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise ExtractError(f"{path} cannot be read: {error.strerror}") from error
    return file


def _check_kind(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ExtractError(f"{path} is no regular file")


def _check_opened(source: Source, file: int, max_bytes: int) -> None:
    """Looks at what was opened, not at the path: that may have been exchanged meanwhile."""
    path, status = source.path, os.fstat(file)
    _check_kind(path, status)
    opened = Path(os.readlink(f"/proc/self/fd/{file}"))
    if source.folder and not opened.is_relative_to(os.path.realpath(source.folder)):
        raise ExtractError(
            f"{path} is a link out of {source.folder}: name {opened} itself to add it"
        )
    if status.st_size > max_bytes:
        raise ExtractError(
            f"{path} has {status.st_size} bytes, more than {max_bytes}: raise --max-bytes or "
            "split it"
        )
