# SPDX-License-Identifier: Apache-2.0
"""What a task does is the job's: it ends, and the threads go on."""

import time
from collections.abc import Callable

from vllm_segreuse.tier.jobs import Job, Jobs, Settle


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
