# SPDX-License-Identifier: Apache-2.0
"""Threads that wait for the file system, so that the owner's does not."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable

Task = Callable[[], None]


class IoThreads:
    """A few threads and one queue: urgent tasks first, otherwise in order.

    They are daemons: a thread that hangs in a system call does not keep the process from ending.
    """

    def __init__(self, threads: int) -> None:
        """Start that many threads."""
        self._tasks: queue.PriorityQueue[tuple[int, int, Task | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"segreuse-tier-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._threads)

    def submit(self, task: Task, urgent: bool) -> None:
        """Have a task run. It must not raise."""
        self._tasks.put((0 if urgent else 1, next(self._numbers), task))

    def stop(self, timeout_s: float) -> bool:
        """Ends the threads once all tasks have run; returns whether they have ended in time."""
        for _ in self._threads:
            self._tasks.put((2, next(self._numbers), None))
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (task := self._tasks.get()[2]) is not None:
            task()
