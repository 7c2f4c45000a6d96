# SPDX-License-Identifier: Apache-2.0
"""`bench english` says of which prompts the default loses answers, and what a bound on drift would
leave of that."""

from dataclasses import replace
from typing import Any

import pytest

from bench.english import figures
from bench.english.records import Record
from bench.harness import Row
from tests.bench.test_english_run import outcome, record


def of_documents(count: int, score: float, drift: float, **fields: Any) -> list[Record]:
    """Two examples, so that each half counts by the other."""
    return [
        replace(
            record(
                number,
                donors=fields.get("donors", "alone"),
                default=outcome(score, first_kl=drift / 10, answer_kl=0.5, drift=drift),
                shift=outcome(0.25),
            ),
            documents=count,
        )
        for number in fields.get("numbers", (0, 1))
    ]


def rows_with(key: str, records: list[Record]) -> list[Row]:
    rows, _ = figures.figures(records)
    return [row for row in rows if key in row]


def test_prompts_are_told_apart_by_their_documents() -> None:
    records = [
        *of_documents(1, 1.0, 0.5, numbers=(0, 1)),
        *of_documents(7, 0.5, 1.5, numbers=(2, 3)),
        *of_documents(8, 1.0, 2.0, numbers=(4, 5)),
        *of_documents(24, 0.0, 4.0, numbers=(6, 7)),
        *of_documents(40, 0.5, 5.0, numbers=(8, 9)),
    ]
    few, some, many = rows_with("documents", records)
    assert [row["documents"] for row in (few, some, many)] == ["up to 7", "8 to 15", "24 and more"]
    assert (few["samples"], few["counted"], few["donors"]) == (4, 4, "alone")
    assert (few["full"], few["default"], few["shift"]) == (1, 0.75, 0.25)
    assert (few["drift"], few["first_kl"], few["answer_kl"]) == (1, 0.1, 0.5)
    assert few["work"] == 0.2
    assert few["less_full_low"] <= -0.25 <= few["less_full_high"]
    assert (some["default"], many["default"]) == (1, 0.25)


def test_kinds_of_donors_are_told_apart() -> None:
    records = [
        *of_documents(3, 1.0, 1.0),
        *of_documents(3, 0.5, 1.0, donors="siblings"),
    ]
    assert [(row["donors"], row["default"]) for row in rows_with("documents", records)] == [
        ("alone", 1),
        ("siblings", 0.5),
    ]


def test_answers_of_tasks_beyond_the_model_do_not_count() -> None:
    unable = [
        record(n, "react", full=0.0, default=outcome(first_kl=0.3, drift=1.0)) for n in range(2)
    ]
    (row,) = rows_with("documents", [*unable, *of_documents(4, 0.5, 1.0)])
    assert (row["samples"], row["counted"]) == (4, 2)
    assert (row["full"], row["default"]) == (1, 0.5)
    assert row["first_kl"] == pytest.approx(0.2)
    (alone,) = rows_with("documents", unable)
    assert alone["counted"] == 0
    assert "default" not in alone


def test_what_is_above_a_bound_is_answered_and_paid_in_full() -> None:
    records = [
        *of_documents(4, 0.0, 3.5, numbers=(0, 1)),
        *of_documents(4, 0.5, 2.0, numbers=(2, 3)),
    ]
    rows = rows_with("max_drift", records)
    assert [row["max_drift"] for row in rows] == ["none", "4", "3", "2.5", "2", "1.5", "1"]
    by_bound = {row["max_drift"]: row for row in rows}
    assert by_bound["none"] == by_bound["4"] | {"max_drift": "none"}
    none, three, two, one = (by_bound[bound] for bound in ("none", "3", "2", "1"))
    assert (none["in_full"], none["work"], none["over_full"]) == (0, 0.2, 0.25)
    assert (three["in_full"], three["work"], three["over_full"]) == (0.5, 0.7, 0.75)
    assert two["in_full"] == 0.5, "at its bound a request is left as it is"
    assert (one["in_full"], one["work"], one["over_full"]) == (1, 1.2, 1)
    assert (none["first_kl"], three["first_kl"], one["first_kl"]) == (0.275, 0.1, 0)
    assert none["kl_p90"] > three["kl_p90"] > one["kl_p90"] == 0


def test_policies_without_drift_have_no_bound() -> None:
    records = [record(n, default=outcome()) for n in range(2)]
    assert rows_with("max_drift", records) == []
    (row,) = rows_with("documents", records)
    assert row["drift"] is None
    assert rows_with("documents", [record(0, shift=outcome())]) == []
