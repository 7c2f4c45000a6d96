# SPDX-License-Identifier: Apache-2.0
"""What the command prints and writes: a table of settings, and what is said of the chosen one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from segreuse_tools.calibrate import drift_limits
from segreuse_tools.calibrate.search import Options, Trial, Verdict, halves, p90
from segreuse_tools.calibrate.trials import LOGPROBS

LEGEND = (
    f"KL: divergence of the first token from full prefill, in nats, by its {LOGPROBS} likeliest "
    "tokens and the rest together; first: share of prompts with the same first token; tokens: "
    "share of greedy tokens that are the same. Bounds are at 95 %."
)
LEAST_WIDTH = 48
"""Of the column of settings."""
PLAIN = "without similar text"


def about_drift(trials: Sequence[Trial], target: float) -> str:
    """How well drift ranks prompts, and what a `max_drift` would do on the half that checks."""
    choosing, checking = halves(trials)
    limit = drift_limits.largest_drift(choosing, target)
    if limit is None:
        return "drift is not measured by this policy"
    correlation = drift_limits.rank_correlation(trials)
    limited = p90(drift_limits.limited(checking, limit))
    in_full = fmean(drift_limits.is_above(trial, limit) for trial in checking)
    return (
        f"drift has rank correlation {'-' if correlation is None else format(correlation, '.2f')} "
        f"with KL; max_drift {limit:g} is for a p90 of KL up to {target:g}: on the prompts it was "
        f"not chosen by, p90 {limited:.4f}, {in_full:.1%} in full"
    )


def name_of(options: Options) -> str:
    """A setting in the table's first column."""
    return " ".join(_words(options)) or PLAIN


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if key == "similarity":
            yield from _words(value)
        elif key == "w_exact":
            yield f"{key}={{{', '.join(f'{at}: {tokens}' for at, tokens in value.items())}}}"
        else:
            yield value if key == "policy" else f"{key}={value}"


def header(width: int = LEAST_WIDTH) -> str:
    """The names of the columns.

    Args:
        width: of the first.
    """
    return (
        f"{'setting':{width}}{'work':>7}{'KL':>8}{'at most':>9}{'median':>8}{'p90':>8}"
        f"{'first':>7}{'at least':>10}{'tokens':>8}"
    )


def row(name: str, verdict: Verdict, width: int = LEAST_WIDTH) -> str:
    """A line below `header`."""
    return (
        f"{name:{width}}{verdict.work:>7.3f}{verdict.divergence:>8.4f}"
        f"{verdict.divergence_at_most:>9.4f}{verdict.divergence_median:>8.4f}"
        f"{verdict.divergence_p90:>8.4f}{verdict.agreement:>7.3f}"
        f"{verdict.agreement_at_least:>10.3f}{verdict.tokens:>8.3f}"
    )


def table(rows: Sequence[tuple[str, Verdict]], chosen: int | None) -> Iterator[str]:
    """Lines of settings by name, the chosen one marked, and what the columns mean."""
    width = max(LEAST_WIDTH, *(len(name) + 1 for name, _ in rows))
    yield LEGEND
    yield f"  {header(width)}"
    for index, (name, verdict) in enumerate(rows):
        yield f"{'*' if index == chosen else ' '} {row(name, verdict, width)}"


def as_yaml(options: Options, about: Sequence[str]) -> str:
    """The file of a server's options, below lines that say where they are from."""
    import yaml

    head = "".join(f"# {line}\n" for line in about)
    return head + yaml.safe_dump(dict(options), sort_keys=False)
