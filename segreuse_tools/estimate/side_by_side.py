# SPDX-License-Identifier: Apache-2.0
"""Caches of several sizes, simulated in as many processes as there are processors.

They know nothing of each other, so each process has some of the sizes, and all prompts. A short log
is not worth starting processes for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import replace
from typing import TypeVar

from segreuse_tools.estimate.gain import GainSetting, Simulation, SizeRow
from segreuse_tools.estimate.prompts import PromptTokens
from segreuse_tools.estimate.request_log import LogError

T = TypeVar("T")

SHORT = 256
"""Prompts of a log that one process is quick enough for."""

TOGETHER = 64
"""Prompts that are sent at once."""

AHEAD = 2
"""Parcels that wait for a process."""


class SideBySide:
    """`Simulation` in several processes; `with` ends them.

    Args:
        setting: see there.
        processes: at most, this one among them; None: as many as there are processors.

    Attributes:
        own: that of this process, which counts the prompts.
    """

    def __init__(self, setting: GainSetting, processes: int | None = None) -> None:
        most = len(os.sched_getaffinity(0)) if processes is None else processes
        self._setting = setting
        self._parts = min(most, len(setting.cache_tokens))
        self._others: list[_Other] = []
        self._waiting: list[PromptTokens] = []
        self.own = Simulation(setting)

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *error: object) -> None:
        for other in self._others:
            other.end()

    def run(self, prompt: PromptTokens) -> None:
        """One more prompt.

        Raises:
            LogError: one of the processes has ended.
        """
        self._waiting.append(prompt)
        if self._parts > 1 and not self._others:
            if len(self._waiting) < SHORT:
                return
            sizes = self._setting.cache_tokens
            mine, *rest = (
                replace(self._setting, cache_tokens=sizes[part :: self._parts])
                for part in range(self._parts)
            )
            self.own = Simulation(mine)
            self._others = [_Other(part) for part in rest]
        if len(self._waiting) >= TOGETHER:
            self.finish()

    def rows(self) -> Iterator[SizeRow]:
        """What all sizes come to, in their order.

        Raises:
            LogError: one of the processes has ended.
        """
        parts = [[*self.own.rows()], *(other.rows() for other in self._others)]
        for number in range(len(self._setting.cache_tokens)):
            yield parts[number % len(parts)][number // len(parts)]

    def finish(self) -> None:
        """Run the prompts that wait yet: `own` has counted all of them then.

        Raises:
            LogError: one of the processes has ended.
        """
        waiting, self._waiting = self._waiting, []
        for other in self._others:
            other.run(waiting)
        for prompt in waiting:
            self.own.run(prompt)


class _Other:
    """Another process, with some of the sizes."""

    def __init__(self, setting: GainSetting) -> None:
        # Not forked: a progress bar has a thread.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _begin, (setting,))
        self._sent: deque[Future[None]] = deque()

    def run(self, prompts: list[PromptTokens]) -> None:
        self._sent.append(self._pool.submit(_run, prompts))
        while len(self._sent) > AHEAD:
            _done(self._sent.popleft())

    def rows(self) -> list[SizeRow]:
        while self._sent:
            _done(self._sent.popleft())
        return _done(self._pool.submit(_rows))

    def end(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _done(future: Future[T]) -> T:
    try:
        return future.result()
    except BrokenExecutor:
        raise LogError(
            "a process that simulates caches has ended: memory may be too short for caches of "
            "this size, so name smaller or fewer --cache-tokens"
        ) from None


_simulation: Simulation


def _begin(setting: GainSetting) -> None:
    global _simulation
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    _simulation = Simulation(setting)


def _run(prompts: list[PromptTokens]) -> None:
    for prompt in prompts:
        _simulation.run(prompt)


def _rows() -> list[SizeRow]:
    return [*_simulation.rows()]
