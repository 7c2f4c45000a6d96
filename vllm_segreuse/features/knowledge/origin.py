# SPDX-License-Identifier: Apache-2.0
"""Who wrote a request's options: a client whose word is to be checked, or this process.

The options travel in `SamplingParams.extra_args`, which clients may fill as well. Where a request
comes from is known by the context in which it is submitted. Who says nothing is trusted least.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Origin(enum.Enum):
    """Of the request that is being handled."""

    UNKNOWN = "nobody has said: a program that runs the engine itself, or a way in unknown to us"
    ENDPOINT = "a client, through an endpoint whose body nobody has checked"
    CHECKED = "a client, through an endpoint whose body was checked"
    BOUND = "a client, through an endpoint whose body was checked and bound to its API key"
    OURSELVES = "this process"

    @property
    def is_trusted(self) -> bool:
        """Whether options that clients cannot write are this process's own."""
        return self in (Origin.BOUND, Origin.OURSELVES)


origin: ContextVar[Origin] = ContextVar("segreuse_origin", default=Origin.UNKNOWN)

_serving = False


@contextmanager
def own_requests() -> Iterator[None]:
    """Requests that are submitted inside come from this process itself."""
    token = origin.set(Origin.OURSELVES)
    try:
        yield
    finally:
        origin.reset(token)


@contextmanager
def serving_clients() -> Iterator[None]:
    """While an API server runs in this process, requests of unknown origin are nobody's program."""
    global _serving
    _serving = True
    try:
        yield
    finally:
        _serving = False


def may_name(trust_programs: bool) -> bool:
    """Whether the request at hand may have extra keys where these are bound to API keys.

    Args:
        trust_programs: `SegReuseConfig.namespaces_trust_programs`.
    """
    written_by = origin.get()
    is_program = written_by is Origin.UNKNOWN and not _serving
    return written_by.is_trusted or (is_program and trust_programs)
