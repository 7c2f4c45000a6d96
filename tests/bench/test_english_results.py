# SPDX-License-Identifier: Apache-2.0
"""The published figures of `bench english` are those of the records beside them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.english import page
from bench.english.command import result_of
from bench.english.records import Records
from bench.harness import REPOSITORY

FILES = sorted((REPOSITORY / "bench/results").glob("*/english-*.jsonl"))


def rounded(value: Any) -> Any:
    """Other versions of SciPy may differ in a last digit."""
    return round(value, 3) if isinstance(value, float) else value


def words(text: str) -> str:
    return re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_result_and_page_are_of_the_records(file: Path, tmp_path: Path) -> None:
    published = json.loads(file.with_suffix(".json").read_text())
    result = result_of(Records.joined([file]))
    assert {key: rounded(value) for key, value in result["summary"].items()} == {
        key: rounded(value) for key, value in published["summary"].items()
    }
    assert len(result["rows"]) == len(published["rows"])
    written = tmp_path / "page.html"
    page.write(written, published["environment"], result)
    assert words(written.read_text()) == words(file.with_suffix(".html").read_text())


def test_there_are_results() -> None:
    assert FILES
