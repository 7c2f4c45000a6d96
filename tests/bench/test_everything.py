# SPDX-License-Identifier: Apache-2.0
"""`bench all`: one suite after the other, resumed where it was, and what fails is told."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import everything, harness

COMMIT = "0123456789"


class Suites:
    """In the place of the suites: writes what they would write.

    Attributes:
        ran: suites that were run, in order.
        fail: those that end with status 3 and leave nothing.
        commit: of the code as a suite finds it.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fail: set[str] = set()
        self.commit = COMMIT

    def __call__(self, suite: str, file: Path, quick: bool) -> int:
        self.ran.append(suite)
        if suite in self.fail:
            return 3
        where = {"commit": self.commit, "quick": quick}
        harness.write_json(file, suite, where, {"rows": [], "summary": {}})
        return 0


@pytest.fixture
def suites() -> Suites:
    return Suites()


@pytest.fixture
def measure(suites: Suites, tmp_path: Path) -> Callable[..., int]:
    def measure(quick: bool = False, commit: str | None = COMMIT) -> int:
        suites.ran.clear()
        return everything.measure_all(tmp_path / "new", quick, commit, suites)

    return measure


def test_every_quoted_suite_runs_once_in_order(
    suites: Suites, measure: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure() == 0
    assert suites.ran == list(everything.SUITES)
    assert {file.name for file in (tmp_path / "new").iterdir()} == {
        f"{suite}.json" for suite in everything.SUITES
    }
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{suite}: 0 s" for suite in everything.SUITES]


def test_a_run_goes_on_where_it_was(
    suites: Suites, measure: Callable[..., int], tmp_path: Path
) -> None:
    measure()
    (tmp_path / "new/rag.json").unlink()
    (tmp_path / "new/soak.json").write_text('{"suite": "so')
    assert measure() == 0
    assert suites.ran == ["rag", "soak"]


def test_other_code_and_rough_answers_are_measured_again(
    suites: Suites, measure: Callable[..., int]
) -> None:
    measure(quick=True)
    assert measure(quick=False) == 0
    assert suites.ran == list(everything.SUITES)
    suites.commit = "abcdef0123"
    assert measure(commit=suites.commit) == 0
    assert suites.ran == list(everything.SUITES)


def test_uncommitted_code_may_have_changed_since(
    suites: Suites, measure: Callable[..., int]
) -> None:
    suites.commit = f"{COMMIT}-dirty"
    for _ in range(2):
        assert measure(commit=suites.commit) == 0
        assert suites.ran == list(everything.SUITES)


def test_a_failure_is_told_at_the_end_and_tried_again(
    suites: Suites, measure: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    suites.fail = {"kernels", "demo"}
    assert measure() == 1
    assert suites.ran == list(everything.SUITES), "others are measured all the same"
    printed = capsys.readouterr()
    assert "kernels: failed (exit status 3)" in printed.out
    assert printed.err.startswith("bench all: failed: kernels, demo;")
    suites.fail = set()
    assert measure() == 0
    assert suites.ran == ["kernels", "demo"]


def test_a_result_of_other_code_is_a_failure(
    suites: Suites, measure: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    suites.commit = f"{COMMIT}-dirty"  # somebody edits while it is measured
    assert measure() == 1
    assert f"is not of commit {COMMIT}" in capsys.readouterr().out


@pytest.mark.parametrize("commit", [None, f"{COMMIT}-dirty"])
def test_uncommitted_code_is_refused_unless_allowed(
    commit: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []
    monkeypatch.setattr(harness, "commit", lambda: commit)
    monkeypatch.setattr(everything, "measure_all", lambda *args: asked.append(args) or 0)
    assert everything.main(["--out", str(tmp_path)]) == 1
    assert "commit it first" in capsys.readouterr().err
    assert not asked
    assert everything.main(["--out", str(tmp_path), "--allow-dirty", "--quick"]) == 0
    assert asked == [(tmp_path, True, commit)]


@pytest.mark.parametrize(("load", "warned"), [(0.2, False), (1.5, True)])
def test_a_busy_machine_is_told(
    load: float,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(harness, "commit", lambda: COMMIT)
    monkeypatch.setattr(everything, "measure_all", lambda *args: 0)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert everything.main(["--out", str(tmp_path)]) == 0
    assert ("busy" in capsys.readouterr().err) is warned


def test_a_suite_runs_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one that notes how it was called: a Python that is none."""
    note = tmp_path / "called"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PWD $*" > {note}\nexit 5\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)
    assert everything.run_suite("ttft", Path("out/ttft.json"), quick=True) == 5
    wanted = f"-m bench ttft --json {tmp_path}/out/ttft.json --quick"
    assert note.read_text() == f"{harness.REPOSITORY} {wanted}\n"


def test_a_suite_may_stop_its_servers_when_all_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bench.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def leave(*_):\n"
        "    pathlib.Path('stopped').touch()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(harness, "REPOSITORY", tmp_path)

    def leave(number: int, frame: object) -> None:
        sys.exit(number)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit):
            everything.run_suite("ttft", tmp_path / "ttft.json", quick=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "stopped").exists()


def test_what_all_measures_the_definitions_of_tables_expect() -> None:
    from bench.tables import definitions

    machines = definitions.read(harness.REPOSITORY).machines
    quoted = {suite for machine in machines.values() for suite in machine.results}
    assert set(everything.SUITES) <= quoted


def test_a_torn_or_foreign_file_is_no_result(tmp_path: Path) -> None:
    file = tmp_path / "ttft.json"
    for content in ("", "[]", "null", "{}", '{"suite": "ttft", "environment": null}'):
        file.write_text(content)
        assert everything.is_measured(file, "ttft", False, COMMIT) is False
    file.write_text(
        json.dumps({"suite": "ttft", "environment": {"commit": COMMIT, "quick": False}})
    )
    assert everything.is_measured(file, "ttft", False, COMMIT)
    assert not everything.is_measured(file, "rag", False, COMMIT)
