# SPDX-License-Identifier: Apache-2.0
"""Bodies that are no proper requests: broken, deep, huge, or not what their headers say."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.e2e.http_bodies import SOUND

JSON = "application/json"
CONTENT_TYPES: tuple[str | None, ...] = (
    JSON,
    "text/plain",
    None,
    "application/json; charset=utf-16",
    "application/json; charset=nonsense",
    "application/vnd.api+json",
    "application/octet-stream",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "a/b/c; ;=",
)
CONTENT_ENCODINGS = ("gzip", "deflate", "br", "identity", "nonsense", "gzip, gzip")
DEEP = 200_000
HUGE_BYTES = 6 << 20


@dataclass(frozen=True)
class Sent:
    """A request: its route, its body as it goes over the wire, and what its headers say."""

    path: str
    content: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": JSON})

    def __str__(self) -> str:
        """Enough to repeat it by hand."""
        return (
            f"{self.path} {dict(self.headers)} {len(self.content)} bytes: {self.content[:1000]!r}"
        )


def malformed(paths: Sequence[str]) -> st.SearchStrategy[Sent]:
    """A route of `paths`, and a body that is broken in one way, under any headers."""
    sound = {path: json.dumps({"model": "m", **body("Hello.")}) for path, body in SOUND.items()}

    def for_path(path: str) -> st.SearchStrategy[Sent]:
        text = sound.get(path, '{"model": "m", "prompt": "Hello."}')
        return st.builds(Sent, st.just(path), _contents(text), _headers())

    return st.sampled_from(sorted(paths)).flatmap(for_path)


def _headers() -> st.SearchStrategy[dict[str, str]]:
    def build(content_type: str | None, encoding: str | None) -> dict[str, str]:
        found = {"Content-Type": content_type, "Content-Encoding": encoding}
        return {name: value for name, value in found.items() if value is not None}

    encodings = st.none() | st.none() | st.none() | st.sampled_from(CONTENT_ENCODINGS)
    types = st.sampled_from(CONTENT_TYPES[:3]) | st.sampled_from(CONTENT_TYPES)
    return st.builds(build, types, encodings)


def _contents(sound: str) -> st.SearchStrategy[bytes]:
    whole = sound.encode()
    places = st.integers(0, len(whole))
    return st.one_of(
        st.sampled_from(_BROKEN).map(lambda make: make(sound)),
        st.sampled_from(_DEEP).map(lambda make: make(sound)),
        st.sampled_from(_HUGE).map(lambda make: make(sound)),
        places.map(lambda end: whole[:end]),
        st.builds(lambda at, noise: whole[:at] + noise + whole[at:], places, st.binary(max_size=9)),
        st.builds(lambda at, byte: whole[:at] + bytes([byte]) + whole[at + 1 :], places, _BYTES),
        st.binary(max_size=60),
    )


_BYTES = st.integers(0, 255)


def _with(sound: str, member: str) -> bytes:
    """The sound body with one more member."""
    return f"{sound[:-1]}, {member}}}".encode("utf-8", "surrogatepass")


_NESTED = "[" * DEEP + "]" * DEEP
_BROKEN: tuple[Callable[[str], bytes], ...] = (
    # no JSON, or no object
    lambda sound: b"",
    lambda sound: b"[]",
    lambda sound: b"null",
    lambda sound: b'"text"',
    lambda sound: b"1e999",
    lambda sound: sound.encode() * 2,
    lambda sound: sound.replace('"', "'").encode(),
    # odd values
    lambda sound: _with(sound, '"extra_keys": NaN, "vllm_xargs": {"segreuse_policy": -Infinity}'),
    lambda sound: _with(sound, f'"extra_keys": 1{"0" * 5000}'),
    lambda sound: _with(sound, '"extra_keys": "a", "extra_keys": ["b"], "extra_keys": {}'),
    lambda sound: _with(sound, '"extra_keys": "\\ud800"'),
    lambda sound: _with(sound, '"extra_keys": "\ud800"'),
    lambda sound: _with(sound, '"\\u0000": "\\u0000"'),
    # other encodings
    lambda sound: b"\xef\xbb\xbf" + sound.encode(),
    lambda sound: sound.encode("utf-16"),
    lambda sound: sound.encode("utf-16-le")[:-1],
    lambda sound: sound.encode("utf-32"),
    lambda sound: sound.replace("Hello", "Gr\xfc\xdfe").encode("latin-1"),
    lambda sound: b"\xff\xfe" + sound.encode(),
    lambda sound: b"\0" * 64,
    lambda sound: gzip.compress(sound.encode()),
    lambda sound: gzip.compress(sound.encode())[:-8],
    lambda sound: gzip.compress(b" " * HUGE_BYTES),
)
"""Bodies that are broken always in the same way, from a sound one."""

_DEEP: tuple[Callable[[str], bytes], ...] = (
    lambda sound: b'{"prompt": ' + b"[" * DEEP,
    lambda sound: b'{"a":' * DEEP,
    lambda sound: _NESTED.encode(),
    lambda sound: _with(sound, f'"prompt": {_NESTED}'),
    lambda sound: _with(sound, f'"extra_keys": {_NESTED}'),
    lambda sound: _with(sound, f'"vllm_xargs": {{"extra_keys": {"[" * 900 + "]" * 900}}}'),
    lambda sound: _with(sound, f'"messages": {"[" * 500 + "]" * 500}'),
)

_HUGE: tuple[Callable[[str], bytes], ...] = (
    lambda sound: _with(sound, f'"extra_keys": "{"x" * HUGE_BYTES}"'),
    lambda sound: _with(sound, f'"extra_keys": [{"0," * (HUGE_BYTES // 4)}0]'),
    lambda sound: _with(sound, f'"vllm_xargs": {{{_members(HUGE_BYTES // 20)}}}'),
    lambda sound: _with(sound, f'"unknown": "{"x" * HUGE_BYTES}"'),
    lambda sound: b" " * HUGE_BYTES,
)
"""Whoever keeps some of them has grown."""


def _members(count: int) -> str:
    return ", ".join(f'"segreuse_{number}": {number}' for number in range(count))


def fixed() -> Iterator[Sent]:
    """Every body that is always broken in the same way, deep and huge ones too, for one route."""
    path = "/v1/completions"
    sound = json.dumps({"model": "m", **SOUND[path]("Hello.")})
    for make in (*_BROKEN, *_DEEP, *_HUGE):
        yield Sent(path, make(sound))


def deep_bodies() -> dict[str, bytes]:
    """Bodies that no endpoint can read for their depth, cut and closed."""
    return {
        "cut": b'{"prompt": ' + b"[" * DEEP,
        "closed": b'{"prompt": ' + _NESTED.encode() + b"}",
        "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    }
