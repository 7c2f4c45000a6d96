# SPDX-License-Identifier: Apache-2.0
"""What was measured, and what it comes to: every lead beside `focus` on the same examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from bench.english.pooling import p90
from bench.english.records import rounded
from bench.english.tape import apart, favourites
from bench.harness import Row, SuiteResult
from bench.quality import statistics

BASELINE = "focus"
DIGITS = 4


@dataclass(frozen=True)
class Outcome:
    """What a lead comes to on one example; see `bench.english.tape.Apart`."""

    first_kl: float
    answer_kl: float
    agreement: float

    @classmethod
    def of(cls, full: torch.Tensor, answer: list[int], logits: torch.Tensor) -> Outcome:
        """Of logits `[answer, vocabulary]` of full prefill, its answer, and a lead's logits."""
        said = list(logits)
        return cls(*map(rounded, apart(list(full), answer, said, favourites(said))))


@dataclass(frozen=True)
class Record:
    """One example, its documents' KV from one source.

    Attributes:
        task, number: of the example.
        source: of its documents' KV (`ingestion.SOURCES`).
        documents: their number.
        tokens: of the prompt.
        reused: tokens of the documents.
        leads: outcomes by lead and share, as `focus@0.15`.
        commit: of the code; None: of a record from before it was kept.
    """

    task: str
    number: int
    source: str
    documents: int
    tokens: int
    reused: int
    leads: Mapping[str, Outcome]
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
        leads = {name: Outcome(**outcome) for name, outcome in entry["leads"].items()}
        return cls(**{**entry, "leads": leads})


def figures(records: Iterable[Record]) -> SuiteResult:
    """A row for each source, share and lead: means, and differences from `focus` at the same share
    on the same examples, with intervals of 95 %."""
    outcomes: dict[tuple[str, str], dict[tuple[str, int], Outcome]] = defaultdict(dict)
    examples = set()
    for record in records:
        examples.add((record.task, record.number))
        for name, outcome in record.leads.items():
            outcomes[record.source, name][record.task, record.number] = outcome
    rows = [_row(source, name, found, outcomes) for (source, name), found in outcomes.items()]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    rows.sort(key=lambda row: (sources.index(row["source"]), row["share"] or 0, row["answer_kl"]))
    return {"rows": rows, "summary": {"examples": len(examples)}}


def _row(
    source: str,
    name: str,
    found: Mapping[tuple[str, int], Outcome],
    outcomes: Mapping[tuple[str, str], Mapping[tuple[str, int], Outcome]],
) -> Row:
    lead, _, share = name.partition("@")
    first = [one.first_kl for one in found.values()]
    row: Row = {
        "source": source,
        "share": float(share) if share else None,
        "lead": lead,
        "examples": len(found),
        "first_kl": round(fmean(first), DIGITS),
        "kl_p90": p90(first),
        "answer_kl": round(fmean(one.answer_kl for one in found.values()), DIGITS),
        "agreement": round(fmean(one.agreement for one in found.values()), DIGITS),
        "same_answers": round(fmean(one.agreement == 1 for one in found.values()), DIGITS),
    }
    baseline = outcomes.get((source, f"{BASELINE}@{share}"), {})
    both = [key for key in found if key in baseline]
    if lead == BASELINE or not both:
        return row
    for figure in ("answer_kl", "agreement"):
        less = [getattr(found[key], figure) - getattr(baseline[key], figure) for key in both]
        low, high = statistics.bootstrap_interval(less)
        row |= {
            f"{figure}_less_focus": round(fmean(less), DIGITS),
            f"{figure}_less_focus_low": None if low is None else round(low, DIGITS),
            f"{figure}_less_focus_high": None if high is None else round(high, DIGITS),
        }
    return row
