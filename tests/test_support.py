# SPDX-License-Identifier: Apache-2.0
"""The table of models has what passing tests have shown, and nothing else."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.shapes import COMPOSED, DRAFTED, LATENT, SUPPORTED, VISION
from tests import support
from vllm_segreuse.engine.version import SUPPORTED as SUPPORTED_VLLM

TESTS = Path(__file__).parent


def report(*values: str, when: str = "call", passed: bool = True, lacks: str = "") -> Any:
    """Of a test that ran; or was skipped at its set-up, since the machine `lacks` something."""
    properties = [("shows", value) for value in values] + [("other", "x")]
    if lacks:
        properties.append(("lacks", lacks))
        when, passed = "setup", False
    return SimpleNamespace(
        when=when, passed=passed, skipped=bool(lacks), user_properties=properties
    )


def session() -> Any:
    return SimpleNamespace(config=SimpleNamespace(), exitstatus=0)


def recorded(file: Path, *reports: Any, mode: str = "record") -> Any:
    recorder, run = support.Recorder(mode, "cpu", file), session()
    for one in reports:
        recorder.pytest_runtest_logreport(one)
    recorder.pytest_sessionfinish(run)
    return run.exitstatus


def test_passing_tests_are_added_in_the_order_of_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "support.json"
    file.write_text(json.dumps({"gpu": {"llama": ["tp"]}, "cpu": {"llama": ["drafts"]}}))
    recorded(file, report("qwen3 tp", "qwen3 partial"), report("llama recompute"))
    assert json.loads(file.read_text()) == {
        "gpu": {"llama": ["tp"]},
        "cpu": {"llama": ["recompute", "drafts"], "qwen3": ["partial", "tp"]},
    }


def test_what_fails_shows_nothing(tmp_path: Path) -> None:
    file = tmp_path / "support.json"
    recorded(file, report("llama tp", passed=False), report("llama tp", when="teardown"))
    assert json.loads(file.read_text()) == {"cpu": {}}


@pytest.mark.parametrize(
    ("shown", "status"),
    [(("llama tp",), 0), ((), 1), (("llama tp", "llama fp8"), 1), (("qwen3 tp",), 1)],
)
def test_a_check_compares_both_ways_and_writes_nothing(
    shown: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    file = tmp_path / "support.json"
    file.write_text(before := json.dumps({"cpu": {"llama": ["tp"]}}))
    assert recorded(file, report(*shown), mode="check") == status
    assert file.read_text() == before


def test_a_check_does_not_miss_what_this_machine_cannot_show(tmp_path: Path) -> None:
    file = tmp_path / "support.json"
    file.write_text(json.dumps({"cpu": {"llama": ["fp8"]}}))
    left_out = report("llama fp8", lacks="fp8_cache")
    assert recorded(file, left_out, mode="check") == 0
    assert recorded(file, left_out, report("llama tp"), mode="check") == 1
    skipped = report("llama fp8", lacks="fp8_cache")
    skipped.user_properties = skipped.user_properties[:1]
    assert recorded(file, skipped, mode="check") == 1, "skipped for another reason"


def test_a_check_does_not_miss_what_the_run_leaves_out(tmp_path: Path) -> None:
    """In this process, or in one of xdist, which says so as it ends."""
    file = tmp_path / "support.json"
    file.write_text(json.dumps({"cpu": {"llama": ["fp8", "tp"], "qwen3": ["tp"]}}))
    worker, other = support.Recorder("check", "cpu", file), support.Recorder("check", "cpu", file)
    worker.pytest_deselected([report("llama fp8"), report("llama tp")])
    ended = SimpleNamespace(config=SimpleNamespace(workeroutput={}), exitstatus=0)
    worker.pytest_sessionfinish(ended)
    assert ended.exitstatus == 0, "only the process that has all results compares"
    other.pytest_testnodedown(SimpleNamespace(workeroutput=ended.config.workeroutput), None)
    other.pytest_testnodedown(SimpleNamespace(), "a process that was killed says nothing")
    for recorder in (worker, other):
        missing, whole = session(), session()
        recorder.pytest_sessionfinish(missing)
        assert missing.exitstatus == 1, "qwen3 is shown by no test"
        recorder.pytest_runtest_logreport(report("qwen3 tp"))
        recorder.pytest_sessionfinish(whole)
        assert whole.exitstatus == 0


def item(*markers: Any, **parameters: Any) -> Any:
    added: list[str] = []
    return SimpleNamespace(
        nodeid="test",
        iter_markers=lambda name: [it.mark for it in markers if it.mark.name == name],
        callspec=SimpleNamespace(params=parameters),
        user_properties=[],
        add_marker=lambda mark: added.append(mark.mark.kwargs["reason"]),
        added=added,
    )


def test_a_marker_names_features_and_the_shape_is_the_family() -> None:
    given = item(pytest.mark.shows("tp", "fp8"), pytest.mark.slow, shape="llama")
    support.note(given)
    assert given.user_properties == [("shows", "llama tp"), ("shows", "llama fp8")]
    given = item(pytest.mark.shows("window", by="windowed"), windowed="gemma3")
    support.note(given)
    assert given.user_properties == [("shows", "gemma3 window")]
    given = item(pytest.mark.shows("tp", family="qwen3"), shape="llama")
    support.note(given)
    assert given.user_properties == [("shows", "qwen3 tp")]


@pytest.mark.parametrize(
    "given", [item(pytest.mark.shows("tp")), item(pytest.mark.shows("speed"), shape="llama")]
)
def test_a_marker_without_a_family_or_with_an_unknown_feature_is_an_error(given: Any) -> None:
    with pytest.raises(pytest.UsageError, match="needs a family, and features of recompute"):
        support.note(given)


@pytest.mark.parametrize("found", [False, True])
def test_what_the_machine_lacks_is_skipped_with_the_reason(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "has", lambda _: found)
    given = item(pytest.mark.needs("fp8_cache"))
    support.leave_out(given)
    assert given.added == ([] if found else [support.NEEDS["fp8_cache"]])
    assert given.user_properties == ([] if found else [("lacks", "fp8_cache")])


def test_a_need_that_is_unknown_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"needs\('speed'\) is not one of fp8_cache, amx"):
        support.leave_out(item(pytest.mark.needs("speed")))


def test_the_committed_table_names_shapes_and_features_that_tests_show() -> None:
    marked: set[str] = set()
    for file in (TESTS / "e2e").glob("test_*.py"):
        for call in re.findall(r"mark\.shows\(([^)]*)\)", file.read_text()):
            marked |= set(re.findall(r'(?<!=)"(\w+)"', call))
    shown = json.loads(support.FILE.read_text())
    for found in shown.values():
        families = {it: has for it, has in found.items() if not it.startswith(support.PATCH)}
        shapes = SUPPORTED | VISION | LATENT | DRAFTED | COMPOSED
        assert families.keys() <= shapes.keys()
        assert {one for features in families.values() for one in features} <= marked
    assert marked <= support.FEATURES.keys()


@pytest.mark.parametrize("version", SUPPORTED_VLLM, ids=str)
def test_every_patch_has_run_on_every_supported_vllm(version: tuple[int, int]) -> None:
    patches = {
        f"{support.PATCH}{it.stem}"
        for it in (TESTS.parent / "vllm_segreuse" / "compat").glob("*.py")
        if it.stem not in ("__init__", "block_events", "patching")
    }
    shown = json.loads(support.FILE.read_text())
    assert patches == {
        it for it in shown[f"cpu {version[0]}.{version[1]}"] if it.startswith(support.PATCH)
    }
