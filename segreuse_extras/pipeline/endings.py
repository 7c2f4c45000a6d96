# SPDX-License-Identifier: Apache-2.0
"""How goes of plans have ended, as the last stage tells all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from segreuse_extras.pipeline.link import PlanVerdict


class GoEnding(NamedTuple):
    """How a go of a plan has ended.

    Attributes:
        answer: float64 `[n]`, what the last stage has made of it (`goes.Go.answer`). It says
            nothing where the verdict is another than fine.
    """

    verdict: PlanVerdict
    answer: np.ndarray


def packed(verdicts: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> torch.Tensor:
    """As they are sent: float64 `[n]`, on the host; waits for the device.

    Args:
        verdicts: int32 `[]`, a `PlanVerdict` each, on the device.
        answers: float64 `[n]` each, on the device.
    """
    parts = [
        part
        for verdict, answer in zip(verdicts, answers, strict=True)
        for part in (verdict.double()[None], answer)
    ]
    return torch.cat(parts).cpu()


def packed_numbers(sizes: Sequence[int]) -> int:
    """How many numbers that takes.

    Args:
        sizes: numbers of each answer.
    """
    return len(sizes) + sum(sizes)


def unpacked(numbers: torch.Tensor, sizes: Sequence[int]) -> list[GoEnding]:
    """The endings.

    Args:
        numbers: see `packed`.
        sizes: numbers of each answer.
    """
    found, first = [], 0
    for size in sizes:
        verdict, *answer = numbers[first : first + 1 + size].tolist()
        found.append(GoEnding(PlanVerdict(int(verdict)), np.array(answer)))
        first += 1 + size
    return found
