# SPDX-License-Identifier: Apache-2.0
"""A request log: JSON lines, each the body of a completion or a chat completion."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from segreuse_tools.json_lines import lines_of, parsed
from vllm_segreuse.options.parsing import EXTRA_KEYS

_EXPECTED = (
    'the body of a completion ("prompt") or of a chat completion ("messages"), or an object that '
    'has it as "body"'
)


class LogError(ValueError):
    """A line of the log cannot be replayed; one sentence names the line and says why."""


@dataclass
class Reason:
    """Why lines are not replayed.

    Attributes:
        reason: of the first of them; those of others may differ in numbers and in what they quote.
        requests: how many lines.
        lines: numbers of the first ones.
    """

    reason: str
    requests: int = 0
    lines: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        s = "" if self.requests == 1 else "s"
        more = ", ..." if self.requests > len(self.lines) else ""
        lines = ", ".join(map(str, self.lines)) + more
        return f"{self.requests:,} request{s} (line{s} {lines}): {self.reason}"


class LeftOut:
    """Lines of a log that are not replayed, by the reason.

    Attributes:
        is_strict: whether a line that a server would refuse is an error.
    """

    def __init__(self, strict: bool = True) -> None:
        self.is_strict = strict
        self._reasons: dict[str, Reason] = {}

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The most frequent first."""
        return tuple(sorted(self._reasons.values(), key=lambda each: -each.requests))

    def add(self, where: str, reason: str) -> None:
        """A line has what no replay takes."""
        found = self._reasons.setdefault(_VALUES.sub("", reason), Reason(reason))
        found.requests += 1
        if len(found.lines) < FIRST_LINES:
            found.lines.append(int(_LINE.findall(where)[-1]))

    def refuse(self, where: str, error: LogError) -> None:
        """A server would refuse a line.

        Raises:
            LogError: that is an error.
        """
        if self.is_strict:
            raise error
        self.add(where, str(error).removeprefix(where).lstrip(": "))


FIRST_LINES = 5
"""Numbers of lines that are kept for each reason."""

_LINE = re.compile(r", line (\d+)")
"""Where a line is. It may hold several requests, whose numbers stand behind it."""

_VALUES = re.compile(r"""\d+|'[^']*'|"[^"]*\"""")
"""What differs between lines that are refused for one reason."""


@dataclass(frozen=True)
class Logged:
    """One line.

    Attributes:
        where: file and number of the line, for messages.
        body: what was sent to `/v1/completions` or `/v1/chat/completions`.
        time_s: when it was sent, in seconds; None: not logged.
        answer: what was answered; None: not logged.
    """

    where: str
    body: dict[str, Any]
    time_s: float | None = None
    answer: str | None = None

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat completion."""
        return "messages" in self.body


def read_log(file: Path, left_out: LeftOut | None = None) -> list[Logged]:
    """Read a file of lines as `_EXPECTED` says.

    Beside the body's own fields, a line may have `extra_keys`, `timestamp` (seconds since any
    moment, or ISO 8601) and `answer` (the text that was generated). Other fields around a "body",
    as in batch files, are ignored. So are blank lines.

    Args:
        left_out: gets the lines that are none; None: the first one is an error.

    Raises:
        LogError: the file cannot be read, holds no request, or a line is none.
    """
    left_out = LeftOut() if left_out is None else left_out
    found: list[Logged] = []
    for where, line in lines_of(file, LogError):
        try:
            found.append(logged(where, parsed(where, line, LogError)))
        except LogError as error:
            left_out.refuse(where, error)
    if not found:
        raise LogError(f"{file} holds no requests: each line must be {_EXPECTED}")
    return found


def logged(where: str, given: Any) -> Logged:
    """What a line is.

    Raises:
        LogError: it is no request.
    """
    around = given if isinstance(given, dict) else {}
    body = around.get("body", around)
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise LogError(f"{where} must be {_EXPECTED}")
    body = dict(body)
    beside = {name: around.get(name) for name in ("timestamp", "answer", EXTRA_KEYS)}
    for name in ("timestamp", "answer"):
        body.pop(name, None)
    if beside[EXTRA_KEYS] is not None:
        body[EXTRA_KEYS] = beside[EXTRA_KEYS]
    answer = beside["answer"]
    if answer is not None and not isinstance(answer, str):
        raise LogError(f"{where}: answer must be the text that was generated, or be omitted")
    return Logged(where, body, _seconds(where, beside["timestamp"]), answer)


def _seconds(where: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise LogError(
        f"{where}: timestamp={value!r} must be a number of seconds, or a date and time of ISO 8601"
    )
