# SPDX-License-Identifier: Apache-2.0
"""Files to which a long run appends what it measures: one that stopped goes on where it was.

The first line says what was asked, every further one is one measurement. A line that was torn by
the end of a process is cut off, and measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bench.harness import write_whole

Made = TypeVar("Made")


class RecordsError(ValueError):
    """A file of records does not belong to this run; the text is one sentence."""


def opened(
    file: Path, command: str, setting: Mapping[str, Any], usual: Mapping[str, Any] | None = None
) -> list[Any]:
    """What a file holds behind its first line: None for a line that is no JSON. The file is begun
    where there is none.

    Args:
        file: where records are.
        command: of `bench`, which made them.
        setting: what must be equal for records to belong together.
        usual: values of names that a first line may omit, and does.

    Raises:
        RecordsError: the file is of another setting, or holds something else.
    """
    usual = usual or {}
    if not file.exists() or not file.stat().st_size:
        file.parent.mkdir(parents=True, exist_ok=True)
        append(file, _first(command, setting, usual))
        return []
    whole = _whole_lines(file)
    other, entries = _parsed(file, whole, command)
    for name, value in setting.items():
        found = other.get(name, usual.get(name))
        if found != value:
            raise RecordsError(
                f"{file} was measured with {name} {found}, not {value}: choose "
                "another file, or remove this one"
            )
    os.truncate(file, len(whole) + 1)
    return entries


def read(file: Path, command: str) -> tuple[dict[str, Any], list[Any]]:
    """What was asked, and what a file holds behind that: None for a line that is no JSON.

    Raises:
        RecordsError: the file is of another command, or there is none.
    """
    try:
        whole = _whole_lines(file)
    except OSError as error:
        raise RecordsError(f"{file} cannot be read: {error.strerror}") from None
    return _parsed(file, whole, command)


def write(
    file: Path,
    command: str,
    setting: Mapping[str, Any],
    entries: Iterable[Mapping[str, Any]],
    usual: Mapping[str, Any] | None = None,
) -> None:
    """A file of these entries, all of it or nothing, in place of what is there; see `opened`."""
    lines = [_first(command, setting, usual or {}), *entries]
    write_whole(file, "".join(map(_line, lines)))


def append(file: Path, entry: Mapping[str, Any]) -> None:
    """One more line."""
    with file.open("a", encoding="utf-8") as out:
        out.write(_line(entry))


def require_commit(
    file: Path, found: Iterable[str | None], commit: str | None, any_commit: bool
) -> None:
    """Raises RecordsError if records are of other code than this, unless that is wanted."""
    others = set(found) - {commit}
    if others and not any_commit:
        raise RecordsError(
            f"{file} was measured at commit {', '.join(sorted(map(str, others)))}, this is "
            f"{commit}: go on with --resume, or remove the file"
        )


def each(file: Path, entries: Iterable[Any], read: Callable[[Any], Made]) -> Iterator[Made]:
    """Entries of a file, read one by one.

    Args:
        file: where they are.
        entries: behind its first line.
        read: makes something of one.

    Raises:
        RecordsError: one is no record of this version.
    """
    for number, entry in enumerate(entries):
        try:
            made = read(entry)
        except (AttributeError, KeyError, TypeError):
            raise not_of_this_version(file, number) from None
        yield made


def not_of_this_version(file: Path, number: int) -> RecordsError:
    """What to raise for an entry, the first being number 0."""
    return RecordsError(
        f"{file}: line {number + 2} is no record of this version: choose another file"
    )


def beside(json_file: Path) -> Path:
    """Where the records of a result are."""
    return json_file.with_suffix(".jsonl")


def _first(command: str, setting: Mapping[str, Any], usual: Mapping[str, Any]) -> Mapping[str, Any]:
    return {command: {name: value for name, value in setting.items() if value != usual.get(name)}}


def _parsed(file: Path, whole: bytes, command: str) -> tuple[dict[str, Any], list[Any]]:
    first, *entries = map(_entry, whole.splitlines() or [b""])
    asked = first.get(command) if isinstance(first, dict) else None
    if not isinstance(asked, dict):
        raise RecordsError(f"{file} is no file of `bench {command}`: choose another name")
    return asked, entries


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _whole_lines(file: Path) -> bytes:
    return file.read_bytes().rpartition(b"\n")[0]


def _entry(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
