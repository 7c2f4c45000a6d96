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


@pytest.mark.parametrize(("interrupted", "status"), [(True, 130), (False, 0)])
def test_a_run_that_was_interrupted_says_so(
    interrupted: bool, status: int, suite: Callable[[SuiteFunction], None], tmp_path: Path
) -> None:
    suite(lambda quick: {**RESULT, "interrupted": interrupted})
    file = tmp_path / "out.json"
    assert command.main(["ttft", "--json", str(file)]) == status
    content = json.loads(file.read_text())
    assert content["environment"]["interrupted"] is interrupted
    assert list(content) == ["suite", "environment", "rows", "summary"]


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


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit, which `harness` takes for its own."""
    for name in ("README.md", "docs/page.md", "bench/results/one.json", "bench/code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as committed\n")
    identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "x")):
        harness.git(*arguments, repository=tmp_path)
    monkeypatch.setattr(harness, "REPOSITORY", tmp_path)
    return tmp_path


def test_commit_is_that_of_the_code(checkout: Path) -> None:
    head = harness.git("rev-parse", "HEAD", repository=checkout)[:10]
    assert harness.commit() == head
    # Neither pages nor results decide what is measured; one suite's result must not spoil the next.
    for name in ("README.md", "docs/page.md", "bench/results/one.json", "bench/results/new.json"):
        (checkout / name).write_text("written by bench\n")
    (checkout / "out.json").write_text("{}")
    assert harness.commit() == head


@pytest.mark.parametrize("name", ["bench/code.py", "bench/new.py", "vllm_segreuse/new.py"])
def test_changed_and_new_code_is_dirty(checkout: Path, name: str) -> None:
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text("changed\n")
    assert str(harness.commit()).endswith("-dirty")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("0123456789abcdef", "0123456789"),
        ("01234567", "01234567"),
        ("0123456789abc-dirty", "0123456789-dirty"),
    ],
)
def test_a_tree_without_its_history_has_the_commit_that_is_named(
    named: str, told: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = checkout / "copied"  # within a repository, which says nothing of it
    copied.mkdir()
    monkeypatch.setattr(harness, "REPOSITORY", copied)
    assert harness.commit() is None
    assert "commit_given" not in harness.environment()
    monkeypatch.setenv("SEGREUSE_BENCH_COMMIT", named)
    assert harness.commit() == told
    where = harness.environment()
    assert (where["commit"], where["commit_given"]) == (told, True)


def test_in_a_checkout_git_knows_better_than_who_names_a_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = str(harness.commit())
    monkeypatch.setenv("SEGREUSE_BENCH_COMMIT", "0123456789")
    (checkout / "bench/code.py").write_text("changed\n")
    where = harness.environment()
    assert where["commit"] == f"{head}-dirty"
    assert "commit_given" not in where
    said = f"SEGREUSE_BENCH_COMMIT=0123456789 is ignored: git says {head}-dirty\n"
    assert capsys.readouterr().err == said


def test_there_is_no_commit_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert harness.commit() is None


def test_environment_tells_what_kernels_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(harness.CORE_BINDING, "0,1")
    flags = {"model name": "A CPU", "flags": "fpu avx2 avx512f amx_tile amx_bf16"}
    monkeypatch.setattr(harness, "_cpu_info", flags.__getitem__)
    where = harness.environment()
    assert where["cpu"] == "A CPU"
    assert where["instruction_sets"] == ["amx", "avx512", "avx2"]
    assert where["omp_threads_bind"] == "0,1"
    assert where["memory_gib"] > 0
    flags["flags"] = "fpu avx2"
    assert harness.environment()["instruction_sets"] == ["avx2"]


def test_a_binding_that_the_suite_sets_is_told(
    suite: Callable[[SuiteFunction], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(harness.CORE_BINDING, raising=False)

    def run(quick: bool) -> harness.SuiteResult:
        monkeypatch.setenv(harness.CORE_BINDING, "1")
        return RESULT

    suite(run)
    command.main(["ttft", "--json", str(tmp_path / "out.json")])
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["environment"]["omp_threads_bind"] == "1"


@pytest.mark.parametrize(
    ("commit", "warned"), [("0123456789", False), ("0123456789-dirty", True), (None, True)]
)
def test_a_result_that_nobody_could_measure_again_is_told(
    commit: str | None, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.write_json(tmp_path / "out.json", "ttft", {"commit": commit}, RESULT)
    assert ("will refuse it" in capsys.readouterr().err) is warned
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    harness.write_json(file, "ttft", {"commit": "0123456789"}, RESULT)
    before = file.read_text()
    broken: harness.SuiteResult = {"rows": [], "summary": {"what": object()}}  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        harness.write_json(file, "ttft", {"commit": "0123456789"}, broken)
    assert file.read_text() == before


@pytest.mark.parametrize("name", command.COMMANDS)
def test_commands_are_found_and_listed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"bench {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert f"\n  {name} " in capsys.readouterr().out
