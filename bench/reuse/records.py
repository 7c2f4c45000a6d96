# SPDX-License-Identifier: Apache-2.0
"""What was measured, and what it comes to: every lead beside the policy on the same examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from bench.english.pooling import counting, p90
from bench.english.records import rounded
from bench.english.tape import apart, favourites
from bench.harness import Row, SuiteResult
from bench.quality import statistics
from bench.reuse.scene import Asked

BASELINES = ("default", "focus")
"""Leads that the others are compared with."""
Key = tuple[str, int]
"""Task and number of an example."""
DIGITS = 4


@dataclass(frozen=True)
class Outcome:
    """What a lead comes to on one example.

    Attributes:
        first_kl, answer_kl, agreement: see `bench.english.tape.Apart`.
        score: of its own answer (`bench.english.grading`).
    """

    first_kl: float
    answer_kl: float
    agreement: float
    score: float

    @classmethod
    def of(cls, asked: Asked, logits: torch.Tensor, score: float) -> Outcome:
        """Of a prompt, a lead's logits `[answer, vocabulary]`, and its score."""
        said = list(logits)
        first, answer, agreement = apart(list(asked.logits), asked.answer, said, favourites(said))
        return cls(rounded(first), rounded(answer), rounded(agreement), round(score, DIGITS))


@dataclass(frozen=True)
class Record:
    """One example, its documents' KV from one source.

    Attributes:
        task, number: of the example.
        source: of its documents' KV (`ingestion.SOURCES`).
        documents: their number.
        tokens: of the prompt.
        reused: tokens of the documents.
        full: score of full prefill's answer.
        leads: outcomes by lead and share, as `focus@0.15`.
        commit: of the code; None: of a record from before it was kept.
    """

    task: str
    number: int
    source: str
    documents: int
    tokens: int
    reused: int
    full: float
    leads: Mapping[str, Outcome]
    commit: str | None = None

    def work(self, share: float) -> float:
        """Tokens computed of those of the prompt, where this share of the reused ones was."""
        return 1 - (1 - share) * self.reused / self.tokens

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
    """A row for each source, share and lead: means, and differences from `BASELINES` at the same
    share on the same examples, with intervals of 95 %."""
    cells: dict[tuple[str, str], dict[Key, Record]] = defaultdict(dict)
    full: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        full[record.task][record.number] = record.full
        for name in record.leads:
            cells[record.source, name][record.task, record.number] = record
    counted = counting(full)
    rows = []
    for (source, name), asked in cells.items():
        found = {key: record.leads[name] for key, record in asked.items()}
        row = _row(source, name, found)
        for baseline in BASELINES:
            other = f"{baseline}@{name.partition('@')[2]}"
            same = {k: one.leads[other] for k, one in cells.get((source, other), {}).items()}
            if row["lead"] != baseline:
                row |= _differences(found, same, baseline)
        counts = [key for key in found if key[1] in counted[key[0]]]
        rows.append(row | _by_answers([(found[key].score, asked[key].full) for key in counts]))
        rows[-1]["work"] = round(
            fmean(one.work(row["share"] or 0.0) for one in asked.values()), DIGITS
        )
    sources = list(dict.fromkeys(row["source"] for row in rows))
    rows.sort(key=lambda row: (sources.index(row["source"]), row["share"] or 0, row["answer_kl"]))
    return {"rows": rows, "summary": {"examples": sum(map(len, full.values()))}}


def _by_answers(scores: Sequence[tuple[float, float]]) -> Row:
    """Of a lead's score and full prefill's of each example that counts."""
    leads, full = [one for one, _ in scores], [other for _, other in scores]
    if not any(full):
        return {"counted": len(scores), "over_full": None}
    low, high = statistics.difference_interval(leads, full)
    return {
        "counted": len(scores),
        "over_full": round(sum(leads) / sum(full), DIGITS),
        "less_full_low": round(low, DIGITS),
        "less_full_high": round(high, DIGITS),
    }


def _row(source: str, name: str, found: Mapping[Key, Outcome]) -> Row:
    lead, _, share = name.partition("@")
    first = [one.first_kl for one in found.values()]
    return {
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


def _differences(
    found: Mapping[Key, Outcome], baseline: Mapping[Key, Outcome], name: str
) -> dict[str, float | None]:
    """Of the examples of both: means, with intervals (bootstrap of examples)."""
    row: dict[str, float | None] = {}
    both = [key for key in found if key in baseline]
    for figure in ("first_kl", "answer_kl", "agreement") if both else ():
        less = [getattr(found[key], figure) - getattr(baseline[key], figure) for key in both]
        low, high = statistics.bootstrap_interval(less)
        row |= {
            f"{figure}_less_{name}": round(fmean(less), DIGITS),
            f"{figure}_less_{name}_low": None if low is None else round(low, DIGITS),
            f"{figure}_less_{name}_high": None if high is None else round(high, DIGITS),
        }
    return row
