# SPDX-License-Identifier: Apache-2.0
"""What is asked, in which order, and how often: one example of every task at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench import harness
from bench.english.arms import Arm
from bench.english.engine import Full
from bench.english.prompts import Prompts
from bench.english.records import Outcome, Record, Records
from bench.english.tasks import draw
from bench.english.tasks.base import Example
from bench.quality import seeds

Random = seeds.Random


@dataclass(frozen=True)
class Load:
    """What a run asks.

    Attributes:
        tasks, donors: by name.
        arms: ways to reuse.
        samples: examples of each task.
        seeds: name of the set of seeds that they are drawn from.
        least_documents: examples of fewer are passed over.
    """

    tasks: tuple[str, ...]
    donors: tuple[str, ...]
    arms: tuple[Arm, ...]
    samples: int
    seeds: str
    least_documents: int = 1


class Asks(Protocol):
    """`engine.Lab`, or what stands for it in tests."""

    prompts: Prompts

    def full(self, example: Example) -> Full:
        """The example's answer by full prefill."""

    def reuse(
        self, example: Example, full: Full, donors: str, arms: Sequence[Arm], rng: Random
    ) -> dict[str, Outcome]:
        """Its outcomes under each arm."""


def to_do(load: Load, records: Records) -> Iterator[tuple[str, int]]:
    """(task, number) of examples of which something is missing, so that all cells grow alike."""
    names = [arm.name for arm in load.arms]
    for number in range(load.samples):
        for task in load.tasks:
            if any(records.missing((task, number, donors), names) for donors in load.donors):
                yield task, number


def measure(lab: Asks, load: Load, records: Records, commit: str | None) -> bool:
    """Ask what the records lack.

    Returns:
        Whether all was asked; an interrupt (Ctrl-C) ends it early.
    """
    steps = list(to_do(load, records))
    try:
        for task, number in harness.progress(steps, "examples"):
            _ask(lab, load, records, commit, task, number)
    except KeyboardInterrupt:
        print(f"interrupted: {len(records)} examples are measured", file=sys.stderr)
        return False
    finally:
        if records.dropped:
            print(
                f"{records.dropped} outcomes were dropped: full prefill answers otherwise than "
                "when they were measured; policies of this run are asked again",
                file=sys.stderr,
            )
    return True


def _ask(
    lab: Asks, load: Load, records: Records, commit: str | None, task: str, number: int
) -> None:
    """Ask one example in full, then what was not measured beside that answer."""
    drawn = draw(task, number, seeds.rng(load.seeds, task, number), lab.prompts.measure)
    if len(drawn.documents) < load.least_documents:
        return
    full = lab.full(drawn)
    names = [arm.name for arm in load.arms]
    for donors in load.donors:
        missing = records.missing((task, number, donors), names, full.outcome)
        if not missing:
            continue
        arms = [arm for arm in load.arms if arm.name in missing]
        rng = seeds.rng(load.seeds, f"{task} {donors}", number)
        outcomes = lab.reuse(drawn, full, donors, arms, rng)
        records.add(
            Record(
                task=task,
                kind=drawn.kind,
                number=number,
                donors=donors,
                documents=len(drawn.documents),
                prompt_tokens=len(lab.prompts.prompt(drawn.documents, drawn.question)),
                commit=commit,
                full=full.outcome,
                arms=outcomes,
            )
        )
