# SPDX-License-Identifier: Apache-2.0
"""What is claimed for the reuse of similar segments, and whether the figures say so.

    h1  at least 20 % of the latency of no reuse is saved, and at most 2 points of success are lost
    h2  with halos of at most 8 tokens the divergence at boundaries is below 0.1 nats
    h3  more than 70 % of the pairs found at a threshold of .8 are right
    h4  fallbacks cap the loss: with them, fewer than 5 % of the first tokens diverge by 0.1 nats

Logits at boundaries are not computed: h2 takes the first token that is said behind accepted
segments. h4 takes the acceptance test, or `max_drift` where that was not measured.

A claim is held if the whole interval of 95 % is on its side of the bound, failed if all of it is on
the other side, and open else: too little was measured, or nothing. All but h3 count traces
(`by_trace`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import harness
from bench.quality import statistics

LEAST_SAVING = 0.2
MOST_SUCCESS_LOST = 0.02
MOST_KL = 0.1
LEAST_PRECISION = 0.7
MOST_FAR = 0.05
HELD, FAILED, OPEN = "held", "failed", "open"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Verdict:
    """A verdict, and what it rests on: one sentence as `str`."""

    verdict: str
    why: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}"


def h1(savings: Sequence[float], full: Sequence[float], similar: Sequence[float]) -> Verdict:
    """Of traces: those that were timed, and those whose answers were scored.

    Args:
        savings: of the latency of no reuse by trace, as shares.
        full, similar: mean score of each trace's steps.
    """
    latency = h1_latency(savings)
    both, said = [latency.verdict, OPEN], [f"{latency.why} ({latency.verdict})", ""]
    if not full:
        said[1] = "success was not measured"
    else:
        lost = _swapped(statistics.difference_interval(similar, full))
        both[1] = _above((-lost[1], -lost[0]), -MOST_SUCCESS_LOST)
        mean_lost = sum(full) / len(full) - sum(similar) / len(similar)
        what = "" if len(full) == len(savings) else f"n = {len(full)} traces, "
        said[1] = f"{what}success lost {_shown(mean_lost, lost)} ({both[1]})"
    verdict = FAILED if FAILED in both else HELD if both == [HELD, HELD] else OPEN
    return Verdict(verdict, ", ".join(said))


def h1_latency(savings: Sequence[float]) -> Verdict:
    """Whether enough latency is saved, by the savings of traces."""
    if len(savings) < harness.FEWEST_FOR_INTERVAL:
        return Verdict(OPEN, f"latency of {len(savings)} traces, too few")
    saved = harness.median_interval(savings)
    shown = _shown(harness.median(savings), saved)
    return Verdict(_above(saved, LEAST_SAVING), f"n = {len(savings)} traces, latency saved {shown}")


def h2(far: Sequence[float]) -> Verdict:
    """Of the first tokens behind accepted segments: the share in each trace that diverges by
    `MOST_KL` or more."""
    return _rarely(far)


def h3(right: int, pairs: int) -> Verdict:
    """Of labelled pairs."""
    if not pairs:
        return Verdict(OPEN, "no pair was found")
    found = statistics.interval([1.0] * right + [0.0] * (pairs - right))
    return Verdict(
        _above(found, LEAST_PRECISION),
        f"n = {pairs} pairs, precision {_shown(right / pairs, found)}",
    )


def h4(far: Sequence[float]) -> Verdict:
    """Of the first tokens under a fallback: the share in each trace that diverges by `MOST_KL` or
    more."""
    return _rarely(far)


def _rarely(far: Sequence[float]) -> Verdict:
    if not far:
        return Verdict(OPEN, "not measured")
    found = statistics.interval(far)
    return Verdict(
        _above((-found[1], -found[0]), -MOST_FAR),
        f"n = {len(far)} traces, share of {MOST_KL} nats or more "
        f"{_shown(sum(far) / len(far), found)}",
    )


def _above(interval: Interval, bound: float) -> str:
    low, high = interval
    return HELD if low >= bound else FAILED if high < bound else OPEN


def _swapped(interval: Interval) -> Interval:
    return -interval[1], -interval[0]


def _shown(value: float, interval: Interval) -> str:
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"
