# SPDX-License-Identifier: Apache-2.0
"""The suite `estimate` runs the command that the documentation shows, and counts its time."""

import json
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench import harness
from bench.suites import estimate

PRINTED = {"requests": 3, "prompt_tokens": 70, "rows": [{}] * 9}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Those that were run; the log is counted while it is there."""
    found: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: Any) -> Any:
        with open(command[4], encoding="utf-8") as log:
            found.append([*command, str(sum("prompt" in json.loads(line) for line in log))])
        return SimpleNamespace(returncode=0, stdout=json.dumps(PRINTED), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_runs_are_timed_behind_one_that_does_not_count(commands: list[Sequence[str]]) -> None:
    result = estimate.run(quick=True)
    assert len(commands) == 1 + len(result["rows"]) == 3
    assert all(command[-1] == "100" for command in commands)
    assert tuple(commands[0][-4:-2]) == ("--num-blocks", "2000")
    assert {row["policies"] for row in result["rows"]} == {8}
    assert result["summary"]["estimate_s"] > 0
    assert {"requests", "prompt_tokens", "estimate_cpu_s"} <= {*result["summary"]}


def test_a_command_that_fails_ends_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=2, stdout="", stderr="no such model")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(harness.BenchError, match="no such model"):
        estimate.run(quick=True)
