# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import __main__ as command
from bench import harness

RESULT: harness.SuiteResult = {
    "rows": [{"mode": "full", "ms": 1234.5}, {"mode": "shift", "ms": 12.25, "reused": 8192}],
    "summary": {"shift_speedup": 100.8},
}

SuiteFunction = Callable[[bool], harness.SuiteResult]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[[SuiteFunction], None]:
    """Puts a function in the place of every suite's `run`."""

    def install(run: SuiteFunction) -> None:
        module = SimpleNamespace(run=run)
        monkeypatch.setattr(command.importlib, "import_module", lambda name: module)

    return install


def test_json_has_the_documented_parts(
    suite: Callable[[SuiteFunction], None], tmp_path: Path
) -> None:
    suite(lambda quick: RESULT)
    file = tmp_path / "deep" / "out.json"
    assert command.main(["ttft", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert list(content) == ["suite", "environment", "rows", "summary"]
    assert content["suite"] == "ttft"
    assert content["rows"] == RESULT["rows"]
    assert content["summary"] == RESULT["summary"]
    where = content["environment"]
    assert where["quick"] is False
    assert {"python", "torch", "vllm", "cpu", "cores", "commit", "date", "seconds"} <= where.keys()
    assert where["torch"] is not None
    assert where["vllm"] is not None


def test_quick_reaches_the_suite(suite: Callable[[SuiteFunction], None]) -> None:
    seen = []
    suite(lambda quick: seen.append(quick) or RESULT)  # type: ignore[func-returns-value]
    command.main(["ttft", "--quick"])
    command.main(["ttft"])
    assert seen == [True, False]


def test_table_and_summary_are_printed(
    suite: Callable[[SuiteFunction], None], capsys: pytest.CaptureFixture[str]
) -> None:
    suite(lambda quick: RESULT)
    command.main(["lookup"])
    printed = capsys.readouterr().out
    assert "shift_speedup = 100.8" in printed
    assert "1234" in printed
    assert "8192" in printed
    assert printed.count("mode") == 1


def test_rows_of_another_kind_have_a_table_of_their_own(
    suite: Callable[[SuiteFunction], None], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*RESULT["rows"], {"mode": "served", "per_s": 7.5}, {"mode": "last", "ms": 3.25}]
    suite(lambda quick: {"rows": rows, "summary": {}})
    command.main(["lookup"])
    heads = [line for line in capsys.readouterr().out.splitlines() if "mode" in line]
    assert ["ms" in head for head in heads] == [True, False]
    assert ["per_s" in head for head in heads] == [False, True]


def test_a_measurement_that_failed_is_no_result(
    suite: Callable[[SuiteFunction], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(quick: bool) -> harness.SuiteResult:
        raise harness.BenchError("nothing was reused")

    suite(run)
    file = tmp_path / "out.json"
    assert command.main(["ttft", "--json", str(file)]) == 1
    assert capsys.readouterr().err == "bench ttft: nothing was reused\n"
    assert not file.exists()


def test_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["speed"])
    assert stopped.value.code == 2
    assert "ttft" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.SUITES)
def test_every_suite_can_be_run(name: str) -> None:
    module = command.importlib.import_module(f"bench.suites.{name}")
    assert callable(module.run)


def test_rotation_starts_with_each_once() -> None:
    assert [harness.rotated("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert sorted(harness.rotated("abc", 2)) == ["a", "b", "c"]


def test_median_of_nothing_is_an_error() -> None:
    with pytest.raises(harness.BenchError, match="nothing was measured"):
        harness.median([])
