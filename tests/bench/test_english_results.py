# SPDX-License-Identifier: Apache-2.0
"""The published figures of `bench english` are those of the records beside them."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.english.command import result_of
from bench.english.records import Records
from bench.harness import REPOSITORY

FILES = sorted(
    (REPOSITORY / "bench/results").glob("*/english-*.jsonl"), key=lambda file: file.stat().st_size
)


def rounded(value: Any) -> Any:
    """Other versions of SciPy may differ in a last digit."""
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "file",
    [*FILES[:1], *(pytest.param(file, marks=pytest.mark.slow) for file in FILES[1:])],
    ids=lambda file: file.stem,
)
def test_the_result_is_of_the_records(file: Path) -> None:
    published = json.loads(file.with_suffix(".json").read_text())
    result = result_of(Records.joined([file]))
    assert {key: rounded(value) for key, value in result["summary"].items()} == {
        key: rounded(value) for key, value in published["summary"].items()
    }
    assert len(result["rows"]) == len(published["rows"])


def test_there_are_results() -> None:
    assert FILES
