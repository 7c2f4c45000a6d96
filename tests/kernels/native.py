# SPDX-License-Identifier: Apache-2.0
"""Compiling kernels/ and csrc/ for tests: CUDA sources as plain C++, or with nvcc."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
KERNELS = CSRC.parent / "kernels"

NVCC_FLAGS: tuple[str, ...] = runpy.run_path(str(CSRC.parent / "setup.py"))["NVCC_FLAGS"]
"""Those of the package's own build."""


def compile_host(source: Path, library: Path) -> None:
    """Build a shared library from C++ or, without its device code, from CUDA C++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    shared = ("-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{CSRC}")
    _run(compiler, *flags, *shared, "-x", "c++", str(source), "-o", str(library))


def compile_cuda(source: Path, library: Path) -> str:
    """Build a shared library for every architecture; returns what the assembler reports."""
    return _run(_nvcc(), *NVCC_FLAGS, f"-I{CSRC}", "-Xptxas=-v", str(source), "-o", str(library))


def compile_ptx(source: Path, target: Path) -> str:
    """PTX of CUDA C++ for the newest architecture."""
    _run(
        _nvcc(),
        "-std=c++17",
        "-ptx",
        "-arch=compute_90",
        f"-I{CSRC}",
        str(source),
        "-o",
        str(target),
    )
    return target.read_text()


def _nvcc() -> str:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc is not installed")
    return compiler


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
