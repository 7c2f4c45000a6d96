# SPDX-License-Identifier: Apache-2.0
"""setup.py builds what the machine can, with flags that keep its promises, and never fails."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from setuptools import Distribution

from tests.kernels.native import CSRC, KERNELS

LEVELS = ("baseline", "avx2", "avx512", "amx")


@pytest.fixture(scope="module")
def setup() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(CSRC.parent / "setup.py")))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CSRC.parent)


@pytest.mark.parametrize("level", LEVELS)
def test_rotations_are_not_fused(setup: SimpleNamespace, level: str) -> None:
    """A fused multiply-add rounds once where torch rounds twice."""
    *compile_commands, _link = setup.CpuKernels(level).commands(Path("out.so"), Path("objects"))
    for source in ("align", "carry", "codecs", "attention"):
        [command] = [c for c in compile_commands if f"kernels/cpu/{source}.cpp" in c]
        assert ("-ffp-contract=off" in command) == (source != "attention")
        assert "-fopenmp" in command
        assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(command)


def test_the_baseline_asks_for_no_instructions(setup: SimpleNamespace) -> None:
    """Each level has its own library, and the lowest runs everywhere."""
    for level in LEVELS:
        command = setup.CpuKernels(level).commands(Path("out.so"), Path("objects"))[0]
        assert any(flag.startswith("-m") for flag in command) == (level != "baseline")


@pytest.mark.parametrize(
    ("machine", "levels"), [("x86_64", LEVELS), ("AMD64", LEVELS), ("aarch64", LEVELS[:1])]
)
def test_what_is_built_where(
    setup: SimpleNamespace, machine: str, levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    names = [kernel.name for kernel in setup.kernels()]
    assert names == [f"vllm_segreuse.kernels._cpu_{level}" for level in levels]


@pytest.mark.parametrize(
    ("nvcc", "cuda", "wanted"),
    [(None, "13.0", False), ("/bin/nvcc", None, False), ("/bin/nvcc", "13.0", True)],
)
def test_cuda_is_built_where_torch_can_use_it(
    setup: SimpleNamespace,
    nvcc: str | None,
    cuda: str | None,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: nvcc)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert setup.wants_cuda() == wanted


@pytest.mark.parametrize("command", ["false", "/no/such/compiler"])
def test_a_kernel_that_does_not_build_is_left_out(
    setup: SimpleNamespace, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder: Any = setup.KernelBuilder(Distribution())
    builder.build_temp = str(tmp_path / "objects")
    builder.get_ext_fullpath = lambda _: str(tmp_path / "_cpu_baseline.so")
    builder.build_extension(SimpleNamespace(name="_cpu_baseline", commands=lambda *_: [[command]]))
    assert "_cpu_baseline is left out" in capsys.readouterr().err


@pytest.mark.parametrize("how", [["build"], ["build_ext", "--inplace"]], ids=" ".join)
def test_no_library_of_an_earlier_build_stays(how: list[str], tmp_path: Path) -> None:
    """It would be loaded, or packed, whatever its sources were."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "kernels", "csrc"):
        tmp_path.joinpath(name).symlink_to(CSRC.parent / name)
    built = tmp_path / "here" / "lib"
    for root in (tmp_path, built):
        folder = root / "vllm_segreuse" / "kernels"
        folder.mkdir(parents=True)
        for name in ("_cpu_baseline.so", "_cuda.so"):
            folder.joinpath(name).write_text("an earlier build")
    options = [f"--build-lib={built}", f"--build-temp={tmp_path / 'objects'}"]
    environment = {**os.environ, "CXX": "false with an option", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "setup.py", "-q", *how, *options]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "_cpu_baseline is left out: Command '['false', 'with', 'an', 'option'" in done.stderr
    made = tmp_path if "--inplace" in how else built
    assert not [*made.glob("vllm_segreuse/kernels/_c*.so")]


def test_every_source_is_compiled_and_every_header_watched(setup: SimpleNamespace) -> None:
    kernels = [setup.CpuKernels("baseline"), setup.CudaKernels()]
    files = {
        str(path.relative_to(CSRC.parent))
        for folder in (CSRC, KERNELS)
        for path in folder.rglob("*.[ch]*")
    }
    assert {name for kernel in kernels for name in (*kernel.sources, *kernel.depends)} == files
