# SPDX-License-Identifier: Apache-2.0
"""Who wrote a request's options: a client whose word is to be checked, or this process.

The options travel in `SamplingParams.extra_args`, which clients may fill as well. Where a request
comes from is known by the context in which it is submitted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Origin(enum.Enum):
    """Of the request that is being handled."""

    PROGRAM = "a program that uses vLLM's classes"
    ENDPOINT = "a client, through an endpoint whose body nobody has checked"
    CHECKED = "a client, through an endpoint whose body was checked and bound to its rights"
    OURSELVES = "this process"

    @property
    def is_trusted(self) -> bool:
        """Whether options that clients cannot write are this process's own."""
        return self in (Origin.CHECKED, Origin.OURSELVES)


origin: ContextVar[Origin] = ContextVar("segreuse_origin", default=Origin.PROGRAM)


@contextmanager
def own_requests() -> Iterator[None]:
    """Requests that are submitted inside come from this process itself."""
    token = origin.set(Origin.OURSELVES)
    try:
        yield
    finally:
        origin.reset(token)
