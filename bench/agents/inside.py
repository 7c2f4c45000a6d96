# SPDX-License-Identifier: Apache-2.0
"""Steps of a trace in this process, one after the other, as `distance` and `success` ask them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench import harness
from bench.agents.arms import Arm
from bench.agents.traces import Request, Trace, Writer


class Asked(NamedTuple):
    """A step: its number in the trace, which it is, and its prompt."""

    number: int
    request: Request
    prompt: list[int]


def steps(lab: Any, trace: Trace, writer: Writer) -> Iterator[Asked]:
    """Every step of a trace; behind the last one nothing is cached any more.

    Args:
        lab: `bench.english.engine.Lab`.
        trace: what is asked.
        writer: of the prompts.

    Raises:
        BenchError: the prefix cache could not be reset.
    """
    for number, request in enumerate(trace.requests):
        yield Asked(number, request, writer.request(trace, request))
    if not lab.llm.reset_prefix_cache():
        raise harness.BenchError("the prefix cache could not be reset: a request still runs")


def under(
    lab: Any, trace: Trace, arm: Arm, prompt: list[int], most: int, forced: Sequence[int] = ()
) -> Any:
    """What an arm answers, in a namespace of its own.

    Raises:
        BenchError: the connector does not run.
    """
    space = f"{trace.kind} {trace.number} {arm.name}"
    # Exact blocks are found in every namespace: only a salt keeps arms apart.
    more: dict[str, Any] = {"forced": forced} if forced else {}
    answered = lab.ask(prompt, most, arm.extra_args(space), salt=space, **more)
    if answered.report is None:
        raise harness.BenchError(f"the arm {arm.name!r} has no report")
    return answered
