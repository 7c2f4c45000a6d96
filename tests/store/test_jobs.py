# SPDX-License-Identifier: Apache-2.0
"""What a task does is the job's: it ends, and the threads go on."""

import time
from collections.abc import Callable

import pytest

from segreuse_store.jobs import Job, Jobs, Settle
from tests.store.records import Hang


def test_a_task_that_raises_fails_its_job_and_no_other() -> None:
    settled: list[str] = []

    def works(name: str) -> Callable[[Job], Settle]:
        return lambda job: lambda: settled.append(name)

    def fails(job: Job) -> Settle:
        raise ValueError("made by the test")

    jobs = Jobs(threads=1, deadline_s=30, clock=time.monotonic)
    jobs.begin(1, [works("a"), fails, works("b")], urgent=False)
    jobs.begin(2, [works("c")], urgent=False)
    jobs.drain()
    assert {result.job_id: result.success for result in jobs.results()} == {1: False, 2: True}
    assert settled == ["a", "b", "c"]
    assert not jobs.pending
    assert jobs.stop()


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def waits(hang: Hang) -> Callable[[Job], Settle]:
    """A task that hangs until it is released."""

    def task(job: Job) -> Settle:
        hang()
        return lambda: None

    return task


def test_what_is_urgent_comes_first_and_all_is_done_before_the_end() -> None:
    done: list[str] = []

    def works(name: str) -> Callable[[Job], Settle]:
        return lambda job: lambda: done.append(name)

    hang = Hang()
    jobs = Jobs(threads=1, deadline_s=30, clock=time.monotonic)
    jobs.begin(None, [waits(hang)], urgent=True)
    assert hang.reached.wait(30)
    assert not jobs.pending, "nobody waits for it"
    for number, (name, urgent) in enumerate((("a", False), ("b", True), ("c", False), ("d", True))):
        jobs.begin(number, [works(name)], urgent)
    assert jobs.pending
    hang.released.set()
    assert jobs.stop()
    assert done == ["b", "d", "a", "c"]
    assert jobs.pending, "not reported yet"
    assert [result.job_id for result in jobs.results()] == [1, 3, 0, 2]
    assert not jobs.pending


def test_a_job_without_tasks_is_over_and_takes_no_time() -> None:
    clock = Clock()
    jobs = Jobs(threads=1, deadline_s=30, clock=clock)
    jobs.begin(7, [], urgent=False)
    assert [tuple(result) for result in jobs.results()] == [(7, True, [], 0.0)]
    assert jobs.results() == []
    assert jobs.stop()


def test_a_job_is_given_up_behind_its_deadline_and_not_at_it() -> None:
    clock, hang = Clock(), Hang()
    jobs = Jobs(threads=1, deadline_s=30, clock=clock)
    clock.now_s = 5
    jobs.begin(1, [waits(hang)], urgent=False)
    assert hang.reached.wait(30)
    clock.now_s = 35
    assert jobs.results() == []
    assert (jobs.stalled, jobs.num_abandoned) == (False, 0)
    clock.now_s = 36
    assert [tuple(result) for result in jobs.results()] == [(1, False, [], 31.0)]
    assert (jobs.stalled, jobs.num_abandoned) == (True, 1)
    hang.released.set()
    while jobs.num_abandoned:
        assert jobs.results() == []
    assert not jobs.stalled
    assert jobs.stop()


def test_a_job_waits_for_its_turn_as_long_as_the_threads_go_on() -> None:
    clock, hangs = Clock(), [Hang() for _ in range(4)]
    jobs = Jobs(threads=1, deadline_s=30, clock=clock)
    for number, hang in enumerate(hangs):
        jobs.begin(number, [waits(hang)], urgent=False)
    results = []
    for hang in hangs:
        assert hang.reached.wait(30)
        clock.now_s += 25
        results += jobs.results()
        hang.released.set()
    jobs.drain()
    results += jobs.results()
    assert [result.success for result in results] == [True] * 4
    assert jobs.stop()


def test_what_waits_behind_a_file_system_that_hangs_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, hang = Clock(), Hang()
    jobs = Jobs(threads=1, deadline_s=30, clock=clock)
    jobs.begin(1, [waits(hang)], urgent=False)
    assert hang.reached.wait(30)
    clock.now_s = 10
    jobs.begin(2, [waits(hang)], urgent=False)
    clock.now_s = 35
    assert [(result.job_id, result.success) for result in jobs.results()] == [(1, False)]
    clock.now_s = 45
    assert [(result.job_id, result.success) for result in jobs.results()] == [(2, False)]
    assert caplog.text.count("did not answer within 35 s") == 2
    hang.released.set()
    assert jobs.stop()


def test_a_task_that_hangs_is_given_up_while_other_threads_go_on() -> None:
    clock, hang, quick = Clock(), Hang(), Hang()
    quick.released.set()
    jobs = Jobs(threads=2, deadline_s=30, clock=clock)
    hanging = jobs.begin(1, [waits(hang)], urgent=False)
    assert hang.reached.wait(30)
    clock.now_s = 20
    jobs.begin(2, [waits(quick)], urgent=False)
    results = []
    while not results:
        results += jobs.results()
    clock.now_s = 31
    results += jobs.results()
    assert {result.job_id: result.success for result in results} == {1: False, 2: True}
    assert hanging.hangs
    assert jobs.stalled
    hang.released.set()
    assert jobs.stop()
