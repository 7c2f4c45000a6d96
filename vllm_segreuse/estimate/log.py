# SPDX-License-Identifier: Apache-2.0
"""A request log: JSON lines, each the body of a completion or a chat completion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm_segreuse.config import EXTRA_KEYS
from vllm_segreuse.json_lines import json_lines

_EXPECTED = (
    'the body of a completion ("prompt") or of a chat completion ("messages"), or an object that '
    'has it as "body"'
)


class LogError(ValueError):
    """A line of the log cannot be replayed; one sentence names the line and says why."""


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


def read_log(file: Path) -> list[Logged]:
    """Read a file of lines as `_EXPECTED` says.

    Beside the body's own fields, a line may have `extra_keys`, `timestamp` (seconds since any
    moment, or ISO 8601) and `answer` (the text that was generated). Other fields around a "body",
    as in batch files, are ignored. So are blank lines.

    Raises:
        LogError: the file cannot be read, holds no request, or a line is none.
    """
    found = [_logged(where, given) for where, given in json_lines(file, LogError)]
    if not found:
        raise LogError(f"{file} holds no requests: each line must be {_EXPECTED}")
    return found


def _logged(where: str, given: Any) -> Logged:
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
