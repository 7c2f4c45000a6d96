# SPDX-License-Identifier: Apache-2.0
"""Where the time of a call goes: functions are wrapped, and each counts what the others do not."""

from __future__ import annotations

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bench.harness import BenchError


class Stopwatch:
    """Seconds by part, since it was last asked.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._parts: dict[str, float] = defaultdict(float)
        self._nested: list[float] = []  # of each function under way, what inner ones took

    def take(self) -> dict[str, float]:
        """Seconds of each part."""
        taken, self._parts = dict(self._parts), defaultdict(float)
        return taken

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time but for that of others counts for a part."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._nested.append(0.0)
            began = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = self._clock() - began
                self._parts[part] += took - self._nested.pop()
                if self._nested:
                    self._nested[-1] += took

        return timed

    @contextmanager
    def on(self, parts: Mapping[str, str]) -> Iterator[None]:
        """Wrap functions while the block runs.

        Args:
            parts: the part of each, by `module:Class.method`.

        Raises:
            BenchError: there is no such function.
        """
        found = {target: _resolved(target) for target in parts}
        originals = {target: vars(owner)[name] for target, (owner, name) in found.items()}
        try:
            for target, (owner, name) in found.items():
                setattr(owner, name, self.timed(parts[target], originals[target]))
            yield
        finally:
            for target, (owner, name) in found.items():
                setattr(owner, name, originals[target])


def _resolved(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner_name, _, name = path.rpartition(".")
    try:
        owner = getattr(importlib.import_module(module), owner_name)
        if not callable(vars(owner)[name]):
            raise KeyError(name)
    except (ImportError, AttributeError, KeyError):
        raise BenchError(f"there is no function {target} to be timed") from None
    return owner, name
