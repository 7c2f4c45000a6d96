# SPDX-License-Identifier: Apache-2.0
"""`scripts/check_vllm.py` finds, without importing anything, what another vLLM would break."""

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_vllm.py"

VLLM = {
    "__init__.py": 'ATTRIBUTES = {"LLM": ".llm:LLM"}\ndef __getattr__(name): ...\n',
    "llm.py": "class LLM:\n    def generate(self, prompts, *, lora=None, unused=1): ...\n",
    "config/__init__.py": "from .scheduler import SchedulerConfig\nfrom vllm.config.all import *\n",
    "config/scheduler.py": "class SchedulerConfig:\n    max_num_seqs: int\n    other: int\n",
    "config/all.py": (
        "from vllm.config.scheduler import SchedulerConfig\n"
        "class VllmConfig:\n    scheduler_config: SchedulerConfig\n"
    ),
    "pool.py": (
        "class Base:\n    def free(self, blocks): ...\n"
        "class Pool(Base):\n"
        "    def __init__(self, size): self.size = size\n"
        "    def name(self, request, block): return 1\n"
    ),
    "helpers.py": "if True:\n    def helper(first, second=2): ...\n",
}
"""What the installed vLLM is like."""

OURS = {
    "patches.py": (
        "def install():\n"
        "    from vllm.pool import Pool\n"
        "    wrap(Pool, 'name', _name)\n"
        "def _name(original):\n"
        "    def name(self, request, block): return original(self, request, block)\n"
        "    return name\n"
    ),
    "own_pool.py": (
        "from vllm.pool import Pool\n"
        "class OurPool(Pool):\n"
        "    def name(self, request, block): return self.size\n"
        "    def leave(self): self.free([])\n"
    ),
    "side.py": (
        "from vllm import LLM\n"
        "from vllm.config import VllmConfig\n"
        "from vllm.helpers import helper\n"
        "def seqs(vllm_config: VllmConfig): return vllm_config.scheduler_config.max_num_seqs\n"
        "def ask(): LLM().generate([], lora=1); helper(1)\n"
    ),
}
"""A small package that uses it."""


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_vllm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["check_vllm"] = module
    spec.loader.exec_module(module)
    return module


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def compared(script: Any, tmp_path: Path) -> Any:
    """Compares with a vLLM in which a text of one file is another."""

    def compare(name: str = "llm.py", find: str = "", replace: str = "") -> Any:
        assert find in VLLM[name]
        changed = VLLM | {name: VLLM[name].replace(find, replace) if find else VLLM[name]}
        written(tmp_path / "old" / "vllm", VLLM)
        written(tmp_path / "new" / "vllm", changed)
        ours = written(tmp_path / "ours", OURS)
        old, new = script.Sources(tmp_path / "old"), script.Sources(tmp_path / "new")
        return script.compare([ours], old, new)

    return compare


def test_the_same_vllm_breaks_nothing(compared: Any) -> None:
    found = compared()
    assert not found.breaks
    assert not found.to_read
    assert not found.unresolved
    assert {"vllm.LLM.generate", "vllm.pool.Pool.name", "vllm.pool.Pool.free"} <= found.compared
    assert "vllm.config.scheduler.SchedulerConfig.max_num_seqs" in found.compared


BREAKS = [
    ("llm.py", "class LLM", "class Other", "vllm.LLM is gone [side.py]"),
    ("llm.py", "generate", "produce", "vllm.LLM.generate is gone [side.py]"),
    ("llm.py", "lora=None", "adapter=None", "vllm.LLM.generate has no parameter lora any more"),
    ("llm.py", ", unused=1", "", None),
    ("helpers.py", "second=2", "second", None),
    ("helpers.py", "first, second=2", "second=2, first=1", "helper takes its parameters in anoth"),
    ("helpers.py", "first, second=2", "first, second=2, *, third", "has the new parameter third"),
    ("helpers.py", "first, second=2", "first, second=2, third=3", None),
    ("helpers.py", "def helper", "def other", "vllm.helpers.helper is gone [side.py]"),
    ("config/scheduler.py", "max_num_seqs", "max_seqs", "SchedulerConfig.max_num_seqs is gone"),
    ("config/scheduler.py", "other", "another", None),
    ("config/all.py", "class VllmConfig", "class Config", "vllm.config.VllmConfig is gone"),
    ("pool.py", "def name", "def named", "vllm.pool.Pool.name, which is patched, is gone [patches"),
    ("pool.py", "request, block", "block, request", "vllm.pool.Pool.name takes its parameters in"),
    (
        "pool.py",
        "request, block",
        "request, block, k=1",
        "takes k, and what we put in its place does not: it took",
    ),
    ("pool.py", "self.size", "self.num", "vllm.pool.Pool.size is gone [own_pool.py]"),
    ("pool.py", "def free", "def release", "vllm.pool.Pool.free is gone [own_pool.py]"),
]


@pytest.mark.parametrize(("name", "find", "replace", "sentence"), BREAKS)
def test_what_would_break_is_named(
    name: str, find: str, replace: str, sentence: str | None, compared: Any
) -> None:
    found = compared(name, find, replace)
    if sentence is None:
        assert not found.breaks
    else:
        assert any(sentence in line for line in found.breaks), list(found.breaks)


def test_keywords_that_are_not_in_the_file_may_be_any(
    compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = OURS["side.py"].replace("lora=1", "**options")
    monkeypatch.setitem(OURS, "side.py", asks)
    [found] = compared("llm.py", ", unused=1", "").breaks
    assert found.startswith("vllm.LLM.generate has no parameter unused any more")


@pytest.mark.parametrize(
    ("takes", "breaks"),
    [
        ("self, request, block", True),
        ("self, request, block, *args", True),
        ("self, request, block, **kwargs", True),
        ("self, request, block, k=2, *, l=3", False),
        ("self, request, block, *args, k=None", True),
        ("self, request, block, *args, **kwargs", False),
        ("self, *args, **kwargs", False),
        ("self, request, block, k=2, **kwargs", False),
        ("self, request, block, k=2, l=3", False),
    ],
)
def test_what_vllm_calls_in_its_functions_place_takes_all_that_they_take(
    takes: str, breaks: bool, compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's callers pass a new parameter as soon as there is one, optional or not."""
    wrapper = OURS["patches.py"].replace("def name(self, request, block)", f"def name({takes})")
    override = OURS["own_pool.py"].replace("def name(self, request, block)", f"def name({takes})")
    monkeypatch.setitem(OURS, "patches.py", wrapper)
    monkeypatch.setitem(OURS, "own_pool.py", override)
    found = compared("pool.py", "request, block", "request, block, k=1, *, l=1").breaks
    places = ["[own_pool.py]", "[patches.py]"] if breaks else []
    assert sorted(line.rpartition(" ")[2] for line in found) == places
    assert all("and what we put in its place does not" in line for line in found)


def test_a_wrapper_that_cannot_be_read_is_said(
    compared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = OURS["patches.py"].replace("    return name\n", "    return partial(name)\n")
    monkeypatch.setitem(OURS, "patches.py", hidden)
    assert compared().unresolved == {"what takes the place of vllm.pool.Pool.name [patches.py]"}


def test_bodies_that_changed_are_listed_to_be_read(compared: Any) -> None:
    found = compared("pool.py", "return 1", "return 2")
    assert not found.breaks
    assert list(found.to_read) == [
        "vllm.pool.Pool.name [own_pool.py]",
        "vllm.pool.Pool.name [patches.py]",
    ]


def test_of_two_places_of_a_name_one_is_enough(script: Any, tmp_path: Path) -> None:
    either = (
        "try:\n    from vllm.old import f\nexcept ImportError:\n    from vllm.new import f\nf(1)\n"
    )
    ours = written(tmp_path / "ours", {"a.py": either})
    old = script.Sources(written(tmp_path / "old", {"vllm/old.py": "def f(x): ..."}))
    assert not script.compare(
        [ours], old, script.Sources(written(tmp_path / "new", {"vllm/new.py": "def f(x): ..."}))
    ).breaks
    assert list(
        script.compare(
            [ours], old, script.Sources(written(tmp_path / "n", {"vllm/new.py": "def f(): ..."}))
        ).breaks
    ) == ["vllm.old.f has no parameter x any more: it took (x), and takes () [a.py]"]
    gone = script.Sources(written(tmp_path / "gone", {"vllm/other.py": ""}))
    assert list(script.compare([ours], old, gone).breaks) == ["vllm.old.f is gone [a.py]"]


def test_what_is_not_in_the_sources_is_said(script: Any, tmp_path: Path) -> None:
    ours = written(tmp_path / "ours", {"a.py": "from vllm import _C\n"})
    vllm = script.Sources(written(tmp_path / "old", {"vllm/__init__.py": ""}))
    assert script.compare([ours], vllm, vllm).unresolved == {"vllm._C"}


def wheel(file: Path, name: str, sources: dict[str, str]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}-9.9.dist-info/METADATA", f"Name: {name}\nVersion: 9.9\n")
        for path, text in sources.items():
            archive.writestr(f"{name}/{path}", text)
    return file


def test_a_wheel_is_read_without_being_installed(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = wheel(tmp_path / "vllm-9.9-py3-none-any.whl", "vllm", {"llm.py": "class LLM: ..."})
    sources, version = script.open_wheel(file)
    assert version == "9.9"
    assert sources.find("vllm.llm", "LLM") is not None
    assert script.main([str(file)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("vLLM 9.9 against ")
    assert "vllm.engine.arg_utils.EngineArgs is gone [compat/engine_args.py]" in out


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda it: wheel(it, "torch", {}), "is a wheel of torch, not of vLLM"),
        (lambda it: it.write_text("no"), "is no wheel: it is no zip archive"),
        (lambda it: zipfile.ZipFile(it, "w").close(), "is no wheel: it holds 0 METADATA files"),
        (lambda it: None, "there is no file"),
    ],
)
def test_another_file_is_refused_in_one_sentence(
    make: Any, sentence: str, script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.whl"
    make(file)
    assert script.main([str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


def test_the_installed_vllm_breaks_nothing_and_is_looked_up_whole(script: Any) -> None:
    installed, version = script.installed_sources()
    assert version.startswith("0.")
    found = script.compare(script.PACKAGES, installed, installed)
    assert not found.breaks
    assert not found.to_read
    assert not found.unresolved
    assert "vllm.config.scheduler.SchedulerConfig.max_num_batched_tokens" in found.compared
    assert "vllm.v1.worker.gpu.model_runner.GPUModelRunner.profile_run" in found.compared
