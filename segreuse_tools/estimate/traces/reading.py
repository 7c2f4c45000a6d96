# SPDX-License-Identifier: Apache-2.0
"""A trace as a stream of requests. Its format is told by its content, not by its name."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.estimate.traces.formats import (
    Format,
    HashIds,
    RagPulse,
    Unread,
    Weka,
    component,
    format_of,
)
from segreuse_tools.estimate.traces.lines import LogLines, files_of, in_folder
from segreuse_tools.estimate.traces.request import TraceRequest

MOST_TRIED = 100
"""Lines at the beginning of a file that may be damaged before its format is known."""

MOST_SORTED, MOST_SORTED_PARTS = 1 << 14, 1 << 20
"""Requests that are sorted by their times at once, and their parts: the memory that this takes."""


def find_format(path: Path) -> Format | None:
    """The format of a log, by its first line that has one; None: none of the first ones has.

    Args:
        path: a file, or a folder of files.

    Raises:
        LogError: it cannot be read.
    """
    for file in files_of(path):
        lines = LogLines([file]).parsed(LeftOut(strict=False))
        for _, value in itertools.islice(lines, MOST_TRIED):
            if (found := format_of(value)) is not None:
                return found
            if component(value) is not None:
                break
    return None


class Trace:
    """A log that carries ids.

    Args:
        path: the file; or its folder.
        left_out: gets what cannot be read.
        block_tokens: of hash ids; None: as the lines tell.

    Attributes:
        format: of it.
        lines: of its files.
        out_of_order: requests whose times run backwards, which are replayed all the same.

    Raises:
        LogError: it cannot be read, or is no trace.
    """

    def __init__(self, path: Path, left_out: LeftOut, block_tokens: int | None = None) -> None:
        found = find_format(path)
        if found is None or found is Format.BODIES:
            raise LogError(f"{path} is no trace of ids: none of its first lines has any")
        self.format = found
        self._left_out = left_out
        self.out_of_order = LeftOut(left_out.is_strict)
        files, lengths = files_of(path), {}
        if found is Format.RAGPULSE:
            folder = path if path.is_dir() else path.parent
            others = [file for file in in_folder(folder) if _is_component_file(file)]
            lengths = _lengths(others, left_out)
            files = [file for file in files if file not in others]
        self.lines = LogLines(files)
        self._reader: Any = {
            Format.RAGPULSE: lambda: RagPulse(lengths),
            Format.WEKA: Weka,
            Format.HASH_IDS: lambda: HashIds(block_tokens),
        }[found]()

    def requests(self) -> Iterator[TraceRequest]:
        """In the order of their times, as far as `MOST_SORTED` requests reach; conversations that
        have clocks of their own, one after the other."""
        if self.format is Format.WEKA:
            return self._unordered()
        return _in_order(self._unordered(), self.out_of_order)

    def _unordered(self) -> Iterator[TraceRequest]:
        for where, value in self.lines.parsed(self._left_out):
            try:
                if format_of(value) is not self.format:
                    raise LogError(f"{where} is no line of a trace of {self.format}")
                for found in self._reader.requests(where, value):
                    if isinstance(found, Unread):
                        self._left_out.refuse(found.where, found.error)
                    else:
                        yield found
            except LogError as error:
                self._left_out.refuse(where, error)


def _is_component_file(file: Path) -> bool:
    lines = LogLines([file]).parsed(LeftOut(strict=False))
    return any(component(value) is not None for _, value in itertools.islice(lines, 1))


def _lengths(files: list[Path], left_out: LeftOut) -> dict[tuple[str, int], int]:
    """Tokens of RAGPulse's components, by group and id."""
    found: dict[tuple[str, int], int] = {}
    for where, value in LogLines(files).parsed(left_out):
        read = component(value)
        if read is None:
            left_out.refuse(where, LogError(f"{where} has no id with its token_length"))
            continue
        group, id, tokens = read
        if found.setdefault((group, id), tokens) != tokens:
            left_out.refuse(where, LogError(f"{where}: {group} {id} had another token_length"))
    return found


def _in_order(requests: Iterator[TraceRequest], noted: LeftOut) -> Iterator[TraceRequest]:
    """Sorted by their times, as far as the buffer reaches; those without one stay where they are.

    Args:
        noted: gets those that stand behind a later one.
    """
    buffer: list[tuple[float, int, TraceRequest]] = []
    latest = emitted = -math.inf
    parts = 0
    for number, request in enumerate(requests):
        time = latest if request.time_s is None else request.time_s
        if time < emitted:
            why = f"{request.where}: its time runs back too far to be sorted"
            noted.refuse(request.where, LogError(why))
        elif time < latest:
            why = f"{request.where}: its time is before that of a line in front of it"
            noted.refuse(request.where, LogError(why))
        latest = max(latest, time)
        heapq.heappush(buffer, (time, number, request))
        parts += len(request.parts)
        while len(buffer) > MOST_SORTED or (parts > MOST_SORTED_PARTS and len(buffer) > 1):
            time, _, first = heapq.heappop(buffer)
            emitted = max(emitted, time)
            parts -= len(first.parts)
            yield first
    while buffer:
        yield heapq.heappop(buffer)[2]
