# SPDX-License-Identifier: Apache-2.0
"""What long runs leave for the tables: figures in a results file, findings among them."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import harness
from tests.e2e import exact_arms, poisoning, states_soak
from tests.knowledge import fuzz

PROMPTS = 3


def found(**differences: list[float]) -> exact_arms.Found:
    """What an engine answers whose arms all equal the cold one, but for those named."""
    arms = {arm: [0.0] * PROMPTS for arm in (*exact_arms.OWN, *exact_arms.EXACT)}
    arms |= {exact_arms.CONTROL: [0.5, 0.25]} | differences
    reused = dict.fromkeys(("hole", "preempted", "tiered"), PROMPTS)
    planned = dict.fromkeys(arms, 0) | reused
    return exact_arms.Found(arms, dict.fromkeys(arms, 7), planned)


def describe(what: exact_arms.Found) -> list[harness.Row]:
    return exact_arms.describe("TP=1", what, lambda line: None)


def test_exact_arms_count_what_is_the_same_to_the_last_bit() -> None:
    result = exact_arms.result([*describe(found()), *describe(found(hole=[0.0, 0.25, math.inf]))])
    assert result["summary"] == {
        "engines": 1,
        "prompts": 2 * PROMPTS,
        "answers": 2 * 5 * PROMPTS,
        "identical": 2 * 5 * PROMPTS - 2,
        "reused": 6 * PROMPTS,
        "controls": 4,
        "findings": 1,
    }
    assert json.dumps(result, allow_nan=False), "no infinity, which is no JSON"


@pytest.mark.parametrize("arm", exact_arms.EXACT)
def test_an_exact_arm_that_differs_is_a_finding(arm: str) -> None:
    rows = describe(found(**{arm: [0.0, 0.0, 1e-6]}))
    assert [row["arm"] for row in rows if row["finding"]] == [arm]


def test_vllm_may_differ_and_the_exact_tier_as_much() -> None:
    own = {"vLLM hole": [0.0, 0.0, 0.01]}
    assert not any(row["finding"] for row in describe(found(**own, hole=[0.0, 0.0, 0.02])))
    assert any(row["finding"] for row in describe(found(**own, hole=[0.0, 0.0, 0.021])))


def test_a_control_that_equals_and_holes_that_are_not_reused_are_findings() -> None:
    rows = describe(found(control=[0.0, 0.0]))
    assert [row["arm"] for row in rows if row["finding"]] == ["control"]
    idle = found()
    idle.planned["hole"] = PROMPTS - 1
    assert [row["arm"] for row in describe(idle) if row["finding"]] == ["hole"]


@pytest.mark.parametrize("failure", ["", "prompt 3"])
def test_poisoning_leaves_a_result_whether_it_fails_or_not(
    failure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def poison(running: Any, expected: Any, counts: Counter[str], similar: bool) -> None:
        assert similar
        counts.update({"twins": 5, "prefix hits": 2})
        if failure:
            raise AssertionError(failure)

    class Running:
        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(poisoning, "references", lambda requests, similar: [])
    monkeypatch.setattr(poisoning, "small_engine", lambda segreuse, similar: Running())
    monkeypatch.setattr(poisoning, "poison", poison)
    file = tmp_path / "poisoning.json"
    status = poisoning.main(["--requests", "9", "--similar", "--json", str(file)])
    content = json.loads(file.read_text())
    assert status == content["summary"]["failed"] == int(bool(failure))
    assert content["suite"] == "poisoning"
    assert {
        "requests": 9,
        "twins": 5,
        "prefix_hits": 2,
        "reused": 0,
        "failure": failure,
    }.items() <= (content["summary"].items())


@pytest.mark.parametrize("failure", ["", "a map has changed"])
def test_a_soak_of_states_leaves_a_result_whether_it_fails_or_not(
    failure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def soaked(count: int, summary: dict[str, float | str]) -> None:
        summary |= {"ended": count - 1}
        if failure:
            raise AssertionError(failure)

    monkeypatch.setattr(states_soak, "soaked", soaked)
    file = tmp_path / "states-soak.json"
    status = states_soak.main(["--requests", "9", "--json", str(file)])
    content = json.loads(file.read_text())
    assert content["suite"] == "states_soak"
    expected = {"requests": 9, "ended": 8, "failed": int(bool(failure)), "failure": failure}
    assert content["summary"] == expected
    assert status == int(bool(failure))


@pytest.mark.parametrize("error", [None, AssertionError("a 500")])
def test_fuzzing_leaves_a_result_whether_it_finds_something_or_not(
    error: Exception | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    server: Callable[[], None],
) -> None:
    def send(client: Any, token: str, requests: int, seed: int, statuses: Counter[int]) -> None:
        statuses.update({200: 3, 401: 3})
        if error is not None:
            raise error

    monkeypatch.setattr(fuzz, "fuzz", send)
    file = tmp_path / "fuzz.json"
    monkeypatch.setattr("sys.argv", ["fuzz", "--requests", "6", "--json", str(file)])
    assert fuzz.main() == int(error is not None)
    content = json.loads(file.read_text())
    assert content["suite"] == "kb-fuzz"
    assert content["rows"] == [{"status": 200, "answers": 3}, {"status": 401, "answers": 3}]
    assert content["summary"]["requests"] == 6
    assert content["summary"]["findings"] == int(error is not None)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is started."""
    import contextlib

    monkeypatch.setattr(
        fuzz, "served_by", lambda engine: contextlib.nullcontext("http://localhost:9")
    )
