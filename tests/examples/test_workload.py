# SPDX-License-Identifier: Apache-2.0
"""The workload has documents in ever new orders, and nothing else that repeats."""

import json
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest

from examples import workload

TEXTS = [f"<document {number}>" for number in range(12)]


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    workload.main(arguments)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_same_seed_gives_the_same_workload() -> None:
    assert list(workload.prompts(TEXTS, 20, 3, 0)) == list(workload.prompts(TEXTS, 20, 3, 0))
    assert list(workload.prompts(TEXTS, 20, 3, 0)) != list(workload.prompts(TEXTS, 20, 3, 1))


def test_a_prompt_has_as_many_different_documents_as_asked_for() -> None:
    for prompt in workload.prompts(TEXTS, 50, 3, 0):
        assert sum(prompt.count(text) for text in TEXTS) == 3
        assert sum(text in prompt for text in TEXTS) == 3


def test_a_prefix_cache_finds_nothing() -> None:
    made = list(workload.prompts(TEXTS, 30, 3, 0))
    for one, other in combinations(made, 2):
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        assert len(list(equal)) < len("Request 10 of 0.")


def test_the_first_documents_are_the_popular_ones() -> None:
    made = list(workload.prompts(TEXTS, 400, 2, 0))
    counts = [sum(text in prompt for prompt in made) for text in TEXTS]
    assert counts[0] > counts[2] > counts[-1] > 0


def test_each_line_has_the_columns_of_both_tools(capsys: pytest.CaptureFixture[str]) -> None:
    made = rows(capsys, "--requests", "3", "--output-tokens", "7")
    assert len(made) == 3
    assert [(it["output_tokens"], it["output_tokens_count"]) for it in made] == [(7, 7)] * 3
    assert all(len(it["prompt"]) > 4 * 4000 for it in made)


def test_documents_may_be_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 99)
    arguments = ["--folder", str(tmp_path), "--documents", "2", "--characters", "6"]
    [made] = rows(capsys, "--requests", "1", *arguments)
    assert sum(f"text {number}\n" in made["prompt"] for number in range(3)) == 2


def test_too_few_documents_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        rows(capsys, "--folder", str(tmp_path), "--documents", "2")
    assert "0 documents are too few for 2 in a request" in capsys.readouterr().err
