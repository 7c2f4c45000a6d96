# SPDX-License-Identifier: Apache-2.0
"""Transfers that the owner waits for: split into tasks of the I/O threads, and over by a deadline.

A task runs in an I/O thread and returns a function, which the owner's thread calls.

The deadline is for an answer of the file system: a task that waits for a thread has not asked yet.
It counts from the begin of the job's oldest task that runs; while none of them runs, from when any
thread was done with a task last. So a slow disk loses nothing of a long queue.

A job that is not over at its deadline is *abandoned*: reported as failed, and whatever its tasks
still do, they neither read nor write host memory from then on (`Job.use_rows`). The owner gives the
rows to others once the job is reported.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from segreuse_store.io_threads import IoThreads

logger = logging.getLogger("vllm.segreuse")

_POLL_S = 0.05
Settle = Callable[[], None]


class JobResult(NamedTuple):
    """What has become of a job: vLLM's `JobResult`, field by field.

    Attributes:
        job_id: as it was submitted.
        success: whether all of it was done.
        successful_keys: of a load: keys whose rows are filled, whether or not all are.
        transfer_time: seconds from the begin to the report.
    """

    job_id: int
    success: bool
    successful_keys: list[bytes]
    transfer_time: float


@dataclass(eq=False)
class Job:
    """Tasks that are reported together.

    Attributes:
        job_id: the owner's; None: nobody waits for it.
        failed: whether something of it has.
        loaded: keys whose rows are filled.
    """

    job_id: int | None
    begun_s: float
    tasks: int
    failed: bool = False
    loaded: list[bytes] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running_since_s: list[float] = field(default_factory=list)
    _abandoned: bool = False

    @property
    def hangs(self) -> bool:
        """Whether it was abandoned while a thread runs a task of it."""
        return self._abandoned and bool(self._running_since_s)

    def use_rows(self, use: Callable[[], None]) -> bool:
        """Calls `use`, which may read and write rows of host memory, and waits for nothing.

        Returns:
            whether it was called: it is not for an abandoned job.
        """
        with self._lock:
            if not self._abandoned:
                use()
            return not self._abandoned

    def task_begins(self, now_s: float) -> None:
        """A thread begins a task."""
        with self._lock:
            self._running_since_s.append(now_s)

    def task_ends(self, began_s: float) -> None:
        """A thread ends the task that it began then."""
        with self._lock:
            self._running_since_s.remove(began_s)

    def waits_since_s(self, last_end_s: float) -> float:
        """Since when the file system has not answered.

        Args:
            last_end_s: when a thread has ended a task of any job last.
        """
        with self._lock:
            if self._running_since_s:
                return min(self._running_since_s)
        return max(self.begun_s, last_end_s)

    def fail(self) -> None:
        """Something of it has failed."""
        self.failed = True

    def abandon(self) -> None:
        """From here on `use_rows` calls nothing."""
        with self._lock:
            self._abandoned = True

    def result(self, now_s: float) -> JobResult:
        """What is reported."""
        assert self.job_id is not None
        success = not (self.failed or self._abandoned)
        return JobResult(self.job_id, success, list(self.loaded), now_s - self.begun_s)


class Jobs:
    """Jobs under way. All methods are for the owner's thread; only `drain` and `stop` wait."""

    def __init__(self, threads: int, deadline_s: float, clock: Callable[[], float]) -> None:
        """Start the I/O threads.

        Args:
            threads: their number.
            deadline_s: seconds without an answer after which a job is abandoned.
            clock: seconds.
        """
        self.num_threads = threads
        self._threads = IoThreads(threads)
        self._deadline_s = deadline_s
        self._clock = clock
        self._last_end_s = -float("inf")
        self._ended: queue.SimpleQueue[tuple[Job, Settle]] = queue.SimpleQueue()
        self._under_way: list[Job] = []
        self._abandoned: list[Job] = []
        self._results: list[JobResult] = []

    @property
    def stalled(self) -> bool:
        """Whether a task of an abandoned job hangs."""
        return any(job.hangs for job in self._abandoned)

    @property
    def num_abandoned(self) -> int:
        """Jobs that were given up, and of which a task runs or waits for a thread."""
        return len(self._abandoned)

    @property
    def pending(self) -> bool:
        """Whether jobs that somebody waits for are under way, or not reported yet."""
        return bool(self._results) or any(job.job_id is not None for job in self._under_way)

    def begin(
        self, job_id: int | None, tasks: Sequence[Callable[[Job], Settle]], urgent: bool
    ) -> Job:
        """Begin a job; without tasks it is over.

        Args:
            job_id: the owner's; None: nobody waits for it.
            tasks: each is given the job, and returns how to settle it. One that raises is logged,
                and fails its job.
            urgent: before the tasks of others.
        """
        job = Job(job_id, self._clock(), len(tasks))
        self._under_way.append(job)
        for task in tasks:
            self._threads.submit(partial(self._run, job, task), urgent)
        return job

    def _run(self, job: Job, task: Callable[[Job], Settle]) -> None:
        began_s = self._clock()
        job.task_begins(began_s)
        try:
            settle = task(job)
        except Exception:
            logger.exception("segment reuse: a transfer of the second tier failed")
            settle = job.fail
        finally:
            self._last_end_s = self._clock()
            job.task_ends(began_s)
        self._ended.put((job, settle))

    def results(self) -> list[JobResult]:
        """Settles what has ended, abandons what is overdue, and returns what is new of both."""
        while not self._ended.empty():
            self._settle_next()
        self._end_all()
        results, self._results = self._results, []
        return results

    def drain(self) -> None:
        """Waits until every job has ended or is abandoned; `results` has them."""
        self._end_all()
        while self._under_way:
            with contextlib.suppress(queue.Empty):
                self._settle_next(_POLL_S)
            self._end_all()

    def stop(self) -> bool:
        """Ends the threads; returns whether none hangs."""
        self.drain()
        return self._threads.stop(_POLL_S)

    def _end_all(self) -> None:
        now_s = self._clock()
        for job in list(self._under_way):
            if not job.tasks:
                self._end(job, now_s)
            elif now_s - (since_s := job.waits_since_s(self._last_end_s)) > self._deadline_s:
                self._abandon(job, now_s, since_s)

    def _settle_next(self, timeout_s: float | None = None) -> None:
        job, settle = self._ended.get(timeout=timeout_s)
        settle()
        job.tasks -= 1
        if not job.tasks and job in self._abandoned:
            self._abandoned.remove(job)

    def _end(self, job: Job, now_s: float) -> None:
        self._under_way.remove(job)
        if job.job_id is not None:
            self._results.append(job.result(now_s))

    def _abandon(self, job: Job, now_s: float, since_s: float) -> None:
        logger.warning(
            "segment reuse: the file system did not answer within %g s: %d tasks are given up",
            now_s - since_s,
            job.tasks,
        )
        job.abandon()
        self._abandoned.append(job)
        self._end(job, now_s)
