# SPDX-License-Identifier: Apache-2.0
"""What was measured, and what it comes to: every arm beside full prefill on the same questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from bench.harness import Row
from bench.quality import statistics
from lab.hybrids.arms import Answers

FULL = "full"
ALL = "all"
DIGITS = 4


@dataclass(frozen=True)
class Outcome:
    """Of one question in one arm: whether it was answered, and the divergence of its first word
    from full prefill (nats)."""

    right: bool
    kl: float


@dataclass(frozen=True)
class Record:
    """One world before one training, its documents from one source.

    Attributes:
        training: its number.
        number: of the world.
        source: of its documents (`arms.SOURCES`).
        kinds: of its questions.
        arms: outcomes of these questions by arm.
        work: tokens read of those of the prompt, by arm.
        commit: of the code.
    """

    training: int
    number: int
    source: str
    kinds: list[str]
    arms: Mapping[str, list[Outcome]]
    work: Mapping[str, float]
    commit: str | None = None

    @property
    def entry(self) -> dict[str, Any]:
        """As a line of a file."""
        return asdict(self)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Record:
        """From a line of a file.

        Raises:
            TypeError, KeyError: it is no record.
        """
        arms = {name: [Outcome(**one) for one in found] for name, found in entry["arms"].items()}
        return cls(**{**entry, "arms": arms})


def outcomes(full: Answers, answers: Answers) -> list[Outcome]:
    """Outcomes of an arm beside full prefill."""
    exact, found = full.logits.log_softmax(-1), answers.logits.log_softmax(-1)
    apart = (exact.exp() * (exact - found)).sum(-1)
    return [
        Outcome(right, round(max(0.0, float(kl)), 6))
        for right, kl in zip(answers.right, apart, strict=True)
    ]


def rows(records: Iterable[Record]) -> list[Row]:
    """A row for each training, source, kind of question (and all of them) and arm.

    Questions of a world are not independent: intervals are of the means of worlds.
    """
    worlds: dict[tuple[int, str, str, str], dict[int, list[Outcome]]] = defaultdict(dict)
    work: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for record in records:
        for arm, found in record.arms.items():
            work[record.training, record.source, arm].append(record.work[arm])
            of_kind: dict[str, list[Outcome]] = defaultdict(list)
            for kind, outcome in zip(record.kinds, found, strict=True):
                of_kind[kind].append(outcome)
                of_kind[ALL].append(outcome)
            for kind, some in of_kind.items():
                worlds[record.training, record.source, kind, arm][record.number] = some
    return [
        _row(*key, found, worlds[*key[:3], FULL])
        | {"work": round(fmean(work[key[0], key[1], key[3]]), DIGITS)}
        for key, found in sorted(worlds.items(), key=lambda item: item[0][:3])
    ]


def _row(
    training: int,
    source: str,
    kind: str,
    arm: str,
    found: Mapping[int, Sequence[Outcome]],
    full: Mapping[int, Sequence[Outcome]],
) -> Row:
    right = [fmean(one.right for one in some) for some in found.values()]
    exact = [fmean(one.right for one in full[number]) for number in found]
    kl = [fmean(one.kl for one in some) for some in found.values()]
    low, high = statistics.interval(right)
    kl_low, kl_high = statistics.bootstrap_interval(kl)
    share_low, share_high = _ratio_interval(right, exact)
    return {
        "training": training,
        "source": source,
        "kind": kind,
        "arm": arm,
        "worlds": len(found),
        "questions": sum(map(len, found.values())),
        "right": round(fmean(right), DIGITS),
        "right_low": round(low, DIGITS),
        "right_high": round(high, DIGITS),
        "of_full": _rounded(fmean(right) / fmean(exact) if any(exact) else None),
        "of_full_low": _rounded(share_low),
        "of_full_high": _rounded(share_high),
        "kl": round(fmean(kl), DIGITS),
        "kl_low": _rounded(kl_low),
        "kl_high": _rounded(kl_high),
    }


def _ratio_interval(
    right: Sequence[float], exact: Sequence[float]
) -> tuple[float | None, float | None]:
    """Of the ratio of means of the same worlds, by BCa bootstrap; None where that says nothing."""
    if len(right) < 2 or not any(exact) or len(set(right)) == 1 or list(right) == list(exact):
        return None, None
    found = stats.bootstrap(
        (np.asarray(right), np.asarray(exact)),
        lambda one, other, axis=-1: one.mean(axis=axis) / other.mean(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=2000,
        confidence_level=statistics.CONFIDENCE,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(value, DIGITS)
