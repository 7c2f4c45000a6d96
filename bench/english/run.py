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


def to_do(load: Load, records: Records) -> Iterator[tuple[str, int, dict[str, list[Arm]]]]:
    """(task, number, arms that are missing by donors), so that all cells grow alike."""
    for number in range(load.samples):
        for task in load.tasks:
            missing = {}
            for donors in load.donors:
                names = records.missing((task, number, donors), [arm.name for arm in load.arms])
                if names:
                    missing[donors] = [arm for arm in load.arms if arm.name in names]
            if missing:
                yield task, number, missing


def measure(lab: Asks, load: Load, records: Records, commit: str | None) -> bool:
    """Ask what the records lack.

    Returns:
        Whether all was asked; an interrupt (Ctrl-C) ends it early.
    """
    steps = list(to_do(load, records))
    try:
        for task, number, missing in harness.progress(steps, "examples"):
            drawn = draw(task, number, seeds.rng(load.seeds, task, number), lab.prompts.measure)
            if len(drawn.documents) < load.least_documents:
                continue
            full = lab.full(drawn)
            for donors, arms in missing.items():
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
    except KeyboardInterrupt:
        print(f"interrupted: {len(records)} examples are measured", file=sys.stderr)
        return False
    return True
