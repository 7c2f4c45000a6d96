# SPDX-License-Identifier: Apache-2.0
"""Formats of traces: how a line is recognised, and the requests that it stands for.

format      a line
RAGPulse    {"timestamp": "82", "output_length": 192, "session_id": "...", "hash_ids":
            {"sys_prompt": [..], "passages_ids": [..], "history": [..], "web_search": [..],
            "user_input": [..]}}; lengths are in files beside it: {"passage_id": 0,
            "token_length": 84}
WEKA        {"id": "...", "block_size": 64, "requests": [{"t": 0.0, "in": 71175, "out": 169,
            "hash_ids": [..]}, ...]}: a conversation with its own ids
hash ids    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [..]}:
            Mooncake's traces (blocks of 512 tokens), and `timed_trace` of `vllm bench serve` (16)
bodies      a body of an OpenAI request (`request_log.py`)
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from segreuse_tools.estimate.request_log import LogError
from segreuse_tools.estimate.traces.request import Kind, PromptPart, TraceRequest
from vllm_segreuse.options.values import short_repr


class Format(StrEnum):
    """Of a log."""

    BODIES = "OpenAI bodies"
    RAGPULSE = "RAGPulse"
    WEKA = "WEKA conversations"
    HASH_IDS = "hash ids"


def format_of(value: Any) -> Format | None:
    """The format that a line has; None: none of these."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("requests"), list) and "block_size" in value:
        return Format.WEKA
    if isinstance(value.get("hash_ids"), dict):
        return Format.RAGPULSE
    if "hash_ids" in value and "input_length" in value:
        return Format.HASH_IDS
    body = value.get("body", value)
    if isinstance(body, dict) and ("prompt" in body) != ("messages" in body):
        return Format.BODIES
    return None


KINDS = {
    "sys_prompt": Kind.SYSTEM,
    "passage": Kind.PASSAGE,
    "history": Kind.HISTORY,
    "web_search": Kind.SEARCH,
    "user_input": Kind.QUESTION,
}
"""Groups of a RAGPulse prompt, in its order."""


def component(value: Any) -> tuple[str, int, int] | None:
    """Group, id and tokens of a line of a RAGPulse component file; None: it is none."""
    if not isinstance(value, dict) or len(value) != 2 or not _is_count(value.get("token_length")):
        return None
    name = next(name for name in value if name != "token_length")
    if not name.endswith("_id") or not _is_id(value[name]):
        return None
    return name.removesuffix("_id"), value[name], value["token_length"]


class RagPulse:
    """Reads lines of a RAGPulse trace.

    Args:
        lengths: tokens of the components, by group and id.
    """

    def __init__(self, lengths: Mapping[tuple[str, int], int]) -> None:
        # Groups have ids of their own: a component's number takes the place of both.
        self._parts = {
            key: PromptPart(number, tokens, KINDS.get(key[0], Kind.BLOCK))
            for number, (key, tokens) in enumerate(lengths.items())
        }

    def requests(self, where: str, value: Mapping[str, Any]) -> Iterator[TraceRequest]:
        """The request of a line.

        Raises:
            LogError: a length is missing, or a field is no such thing.
        """
        parts: list[PromptPart] = []
        for name, ids in value["hash_ids"].items():
            group = name.removesuffix("_ids").removesuffix("s") if name.endswith("_ids") else name
            for id in _ids(where, name, ids):
                part = self._parts.get((group, id))
                if part is None:
                    raise LogError(f"{where}: no file beside it has the length of {group} {id}")
                if part.tokens:
                    parts.append(part)
        if not parts:
            raise LogError(f"{where} has no tokens")
        output, time = _count(where, value, "output_length"), _time(where, value.get("timestamp"))
        yield TraceRequest(where, tuple(parts), output, time, _session(value))


class Unread(NamedTuple):
    """A request that cannot be read: where it is, and why."""

    where: str
    error: LogError


class Weka:
    """Reads WEKA's conversations. Their ids mean the same within a conversation only."""

    def requests(self, where: str, value: Mapping[str, Any]) -> Iterator[TraceRequest | Unread]:
        """The requests of a conversation; in place of one that cannot be read, why not.

        Raises:
            LogError: it has no block size.
        """
        size = value["block_size"]
        if not _is_count(size) or not size:
            raise LogError(f"{where}: block_size={size!r} must be a number of tokens")
        session = str(value.get("id", where))
        salt = hashlib.blake2b(session.encode(), digest_size=8).digest()
        base = int.from_bytes(salt, "little")
        before = -math.inf
        for number, request in enumerate(value["requests"], 1):
            here = f"{where}, request {number}"
            try:
                found = self._request(here, request, size, base, session)
                if found.time_s is not None and found.time_s < before:
                    raise LogError(f"{here}: t={found.time_s} is before that of the one in front")
            except LogError as error:
                why = str(error).removeprefix(here).lstrip(": ")
                which = f"request {number} of the conversation {short_repr(session)}"
                yield Unread(here, LogError(f"{here}: {why} ({which})"))
                continue
            before = before if found.time_s is None else found.time_s
            yield found

    @staticmethod
    def _request(where: str, value: Any, size: int, base: int, session: str) -> TraceRequest:
        if not isinstance(value, dict) or "hash_ids" not in value:
            raise LogError(f"{where} has no hash_ids")
        tokens = _count(where, value, "in", least=1)
        ids = [(base + id) % (1 << 62) for id in _ids(where, "hash_ids", value["hash_ids"])]
        parts = _blocks(ids[: -(-tokens // size)], tokens, size)
        output = _count(where, value, "out")
        return TraceRequest(where, parts, output, _time(where, value.get("t")), session)


class HashIds:
    """Reads lines with ids of blocks of one size, which the lines themselves tell."""

    def __init__(self, block_tokens: int | None = None) -> None:
        self.block_tokens = block_tokens

    def requests(self, where: str, value: Mapping[str, Any]) -> Iterator[TraceRequest]:
        """The request of a line.

        Raises:
            LogError: a field is no such thing, or as many ids are no blocks of as many tokens.
        """
        ids = _ids(where, "hash_ids", value["hash_ids"])
        tokens = _count(where, value, "input_length", least=1)
        size = self._size(where, len(ids), tokens)
        output, time = _count(where, value, "output_length"), _time(where, value.get("timestamp"))
        yield TraceRequest(where, _blocks(ids, tokens, size), output, time, _session(value))

    def _size(self, where: str, ids: int, tokens: int) -> int:
        if self.block_tokens is None:
            fitting = [size for size in SIZES if -(-tokens // size) == ids]
            if len(fitting) != 1:
                # Of a prompt of one block any size could be; of none, assume the usual one.
                return max(fitting, default=512)
            (self.block_tokens,) = fitting
        if -(-tokens // self.block_tokens) != ids:
            raise LogError(
                f"{where}: {ids} hash_ids for input_length={tokens} are no blocks of "
                f"{self.block_tokens} tokens, as in front"
            )
        return self.block_tokens


SIZES = tuple(1 << power for power in range(4, 13))
"""Tokens that a block may have."""

_rest = itertools.count(1 << 62)
"""Ids of text that no id stands for."""


def _blocks(ids: list[int], tokens: int, size: int) -> tuple[PromptPart, ...]:
    """Blocks of `size` tokens, of which the last may have fewer; and what no id stands for."""
    whole = min(len(ids), tokens // size)
    parts = [PromptPart(id, size) for id in ids[:whole]]
    left = tokens - whole * size
    if left and whole < len(ids):
        parts.append(PromptPart(ids[whole], min(left, size)))
        left -= parts[-1].tokens
    return (*parts, PromptPart(next(_rest), left)) if left else tuple(parts)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _ids(where: str, name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(map(_is_id, value)):
        raise LogError(f"{where}: {name} must be a list of ids from 0 to 2**62 - 1")
    return value


def _count(where: str, value: Mapping[str, Any], name: str, least: int = 0) -> int:
    found = value.get(name, 0 if least == 0 else None)
    if not _is_count(found) or found < least:
        raise LogError(f"{where}: {name}={found!r} must be a number of tokens from {least} on")
    return int(found)


def _time(where: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        time = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        time = math.nan
    if not math.isfinite(time) or isinstance(value, bool):
        raise LogError(f"{where}: the time {value!r} must be a number")
    return time


def _session(value: Mapping[str, Any]) -> str | None:
    found = value.get("session_id")
    return None if found in (None, "") else str(found)
