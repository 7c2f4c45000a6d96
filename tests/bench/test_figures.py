# SPDX-License-Identifier: Apache-2.0
"""From made-up outcomes to rows, summary and page: what a reader is told follows from them."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.harness import Row
from bench.quality import figures, page, statistics
from bench.quality.engine import FULL, Arm, Outcome
from bench.quality.tasks import RULER, Example, example
from bench.suites import quality

ARMS = (FULL, *(Arm(name, {"policy": "shift"}) for name in ("shift", "sparsex", "hybrid", "focus")))
SURE = Outcome(1.0, {1: math.log(0.9), 2: math.log(0.1)}, 1.0, 90.0, 0.9)
UNSURE = replace(SURE, score=0.0, first={1: math.log(0.2), 2: math.log(0.8)})
Right = Callable[[int], bool]


def results(number: int, right: dict[str, Right], work: dict[str, float]) -> figures.Results:
    """`number` examples of each RULER task; a policy that is not named is always right."""
    drawn = {task: example(task, Random(0), tokens=512) for task in RULER}
    return {
        task: [
            (
                drawn[task],
                {
                    arm.name: replace(
                        SURE if right.get(arm.name, lambda _: True)(index) else UNSURE,
                        work=work.get(arm.name, 0.5),
                    )
                    for arm in ARMS
                },
            )
            for index in range(number)
        ]
        for task in RULER
    }


MANY = results(
    200,
    {"shift": lambda i: i % 2 == 0, "sparsex": lambda i: i > 3, "focus": lambda i: i > 0},
    {"hybrid": 0.7, "focus": 0.06, "shift": 0.03},
)


@pytest.fixture(scope="module")
def found() -> tuple[list[Row], figures.Summary]:
    return figures.figures(MANY, ARMS)


def row_of(rows: list[Row], task: str, policy: str) -> Row:
    [row] = [row for row in rows if (row["task"], row["policy"]) == (task, policy)]
    return row


def test_a_row_compares_with_full_prefill_on_the_same_examples(
    found: tuple[list[Row], figures.Summary],
) -> None:
    rows, _ = found
    row = row_of(rows, "RULER", "sparsex")
    assert row["samples"] == 800
    assert row["accuracy"] == 0.98
    assert row["low"] < 0.98 < row["high"] < 1
    assert row["difference"] == -0.02
    assert row["difference_low"] < -0.02 < row["difference_high"] < 0
    assert row["differing"] == 16
    assert row["p_against_full"] == pytest.approx(2**-15, rel=0.05)
    assert row["top1_agreement"] == 0.98
    assert row["first_token_kl"] == pytest.approx(
        0.02 * (0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)), abs=1e-4
    )
    assert row["kl_low"] < row["first_token_kl"] < row["kl_high"]
    assert "difference" not in row_of(rows, "RULER", "full")


def test_every_comparison_of_a_run_is_corrected_for(
    found: tuple[list[Row], figures.Summary],
) -> None:
    rows, summary = found
    compared = [row for row in rows if row["policy"] != "full"]
    among = ("best_against_hybrid", "hybrid_against_sparsex")
    raw = [row["p_against_full"] for row in compared] + [summary[f"p_{key}"] for key in among]
    corrected = [row["p_holm"] for row in compared] + [summary[f"p_{key}_holm"] for key in among]
    assert len(raw) == summary["comparisons"] == 5 * 4 + 2
    assert all(row["comparisons"] == len(raw) for row in compared)
    assert corrected == pytest.approx(statistics.holm(raw), rel=0.05)  # they are rounded
    assert 0 < min(raw) < 1e-100, "a small p is not rounded to 0"


def test_verdicts_say_what_was_shown_and_no_more(
    found: tuple[list[Row], figures.Summary],
) -> None:
    rows, _ = found
    assert row_of(rows, "RULER", "shift")["verdict"] == "lower"
    assert row_of(rows, "RULER", "hybrid")["verdict"] == "equivalent"
    # Four of 800 answers lost: too few to be significant, and within the margin.
    assert row_of(rows, "RULER", "focus")["verdict"] == "equivalent"
    # One of 200: neither was shown.
    assert row_of(rows, "vt", "focus")["verdict"] == "open"
    far = {"p_holm": 0.04, "difference": 0.1, "difference_low": 0.05, "difference_high": 0.2}
    assert figures.verdict(far) == "higher"
    near = {"p_holm": 0.04, "difference": -0.01, "difference_low": -0.015, "difference_high": -0.01}
    assert figures.verdict(near) == "lower, equivalent"
    assert figures.verdict({**near, "p_holm": 0.06}) == "equivalent"


def test_the_best_policy_is_the_cheapest_of_those_shown_to_be_as_good(
    found: tuple[list[Row], figures.Summary],
) -> None:
    _, summary = found
    assert (summary["best_policy"], summary["best_work"]) == ("focus", 0.06)
    # With ten examples a task nothing is shown to be as good as the top.
    few = results(10, {"focus": lambda i: i > 0, "shift": lambda i: i > 5}, {"hybrid": 0.4})
    _, summary = figures.figures(few, ARMS)
    assert summary["best_policy"] == "hybrid"


def test_every_figure_of_the_page_has_its_interval_and_every_table_its_box(
    found: tuple[list[Row], figures.Summary], tmp_path: Path
) -> None:
    rows, summary = found
    drawn: Example = MANY["vt"][0][0]
    computed = {"focus": np.ones((8, len(drawn.prompt)), dtype=np.int64)}
    where = {"date": "-", "cpu": "-", "cores": 2, "vllm": "-", "commit": "-"}
    file = tmp_path / "page.html"
    said = {"model": "models/lab", "seeds": "reporting", **summary}
    page.write(file, where, {"rows": rows, "summary": said}, drawn, computed)
    text = file.read_text()
    for row in rows:
        assert f"{row['accuracy']:.3f}<small>{row['low']:.3f} to {row['high']:.3f}<" in text
        if row["policy"] != "full" and row["task"] != "vt, hop 1":
            assert f"<small>{row['difference_low']:+.3f} to {row['difference_high']:+.3f}<" in text
            assert f"<td>{row['verdict']}</td>" in text
    assert "models/lab, reporting seeds" in text
    assert "n = 800" in text
    assert f"all {summary['comparisons']}\ncomparisons" in text
    assert "&plusmn;0.000" not in text
    assert text.count("<table>") == text.count("<div class=wide tabindex=0><table>") > 1
    assert re.search(r"\.wide\{[^}]*overflow-x:auto", text)


def test_what_is_printed_fits_a_terminal(found: tuple[list[Row], figures.Summary]) -> None:
    rows, summary = found
    printed = quality.shown({"rows": rows, "summary": summary})
    assert printed["summary"] == summary
    assert all(len(row) <= 12 for row in printed["rows"])
    assert [row["verdict"] for row in printed["rows"] if "verdict" in row] == [
        row["verdict"] for row in rows if "verdict" in row
    ]
