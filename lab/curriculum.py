# SPDX-License-Identifier: Apache-2.0
"""What is learnt one after the other: short rows first, counting late, full length last."""

from __future__ import annotations

from dataclasses import dataclass

from lab.mixture import Stage


@dataclass(frozen=True)
class Lesson:
    """A stage of the data, and how it is learnt.

    Attributes:
        stage: what the rows are.
        steps: most steps.
        enough: accuracy of the worst kind of question, counting aside (it is learnt from the first
            lesson to the last), at which the lesson is left before.
        rate: factor of the learning rates.
        falling: whether the rates fall to nothing over the lesson, and the model becomes the
            running mean of its weights.
    """

    stage: Stage
    steps: int
    enough: float = 1.01
    rate: float = 1.0
    falling: bool = False


CURRICULUM = [
    Lesson(Stage(48, 96, max_hops=0, recall=1.0), 1500, 0.98),
    Lesson(Stage(96, 48, max_hops=1, recall=0.3), 1500, 0.93),
    Lesson(Stage(128, 36, max_hops=2, recall=0.1), 1200, 0.94),
    Lesson(Stage(192, 24, max_hops=3, recall=0.05), 1200, 0.95),
    Lesson(Stage(320, 14, max_hops=4, recall=0.05), 600, 0.96),
    Lesson(Stage(640, 7, max_hops=4, recall=0.02), 600, 0.97),
    # Counting comes late: it needs many examples, with little else to learn.
    Lesson(Stage(128, 36, max_hops=3, counting=0.9, frequent=0.8), 900, rate=0.7),
    # The longest hops take examples of their own.
    Lesson(Stage(192, 24, max_hops=4, counting=0.2, chains=0.7), 1500, 0.97),
    Lesson(Stage(640, 7, max_hops=4, counting=0.2, chains=0.3), 300, 0.98),
    Lesson(Stage(128, 36, max_hops=4, counting=0.9, frequent=0.8), 600, rate=0.7),
    Lesson(Stage(512, 9, max_hops=4, counting=0.8, frequent=0.8), 500, rate=0.6),
    Lesson(
        Stage(2304, 2, max_hops=4, counting=0.7, frequent=0.7, chains=0.2),
        3000,
        rate=0.6,
        falling=True,
    ),
]

HYBRID_CURRICULUM = [
    Lesson(Stage(48, 48, max_hops=0, recall=1.0), 800, 0.98),
    Lesson(Stage(128, 24, max_hops=1, recall=0.1, counting=0), 1600, 0.95),
    # As long as the prompts of the study, no longer.
    Lesson(Stage(640, 5, max_hops=1, counting=0), 600, rate=0.6, falling=True),
]
"""What the hybrid learns for `lab.hybrids`: no counting, chains of one hop, minutes on one core."""
