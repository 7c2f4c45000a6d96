# SPDX-License-Identifier: Apache-2.0
"""Run a command as a machine with fewer instruction sets would run it.

    .venv/bin/python -m tests.lesser_cpu avx2 .venv/bin/python -m pytest tests/kernels

`LEVEL COMMAND...` runs the command; nothing prints the levels below this machine's own, one a line.
What asks the CPU is told of no more than the level has: torch, oneDNN, MKL, vLLM, numba, compilers,
and our kernels, in every process that the command starts (`lesser_cpu.c`). /proc/cpuinfo still
tells of the machine, and the C library has asked before. At `baseline` vLLM runs its libraries for
AVX2, as they are its least.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.harness import INSTRUCTION_SETS

LEVELS = ("avx512_bf16", "avx512", "avx2", "baseline")
"""What a machine may pass for. In `bench.harness.INSTRUCTION_SETS` are their names, and AMX."""

_SOURCE = Path(__file__).with_suffix(".c")
_BUILD = Path(__file__).parent.parent / "build" / "lesser_cpu"
_ARCH_PRCTL, _ARCH_CPUID = 158, 0x1012


def refusal() -> str | None:
    """Why this machine cannot pass for a lesser one, or None if it can."""
    if os.uname().machine != "x86_64":
        return f"there are levels on x86-64 only; this is {os.uname().machine}"
    if ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _ARCH_CPUID, 1):
        why = os.strerror(ctypes.get_errno())
        return f"CPU and system do not let processes trap CPUID ({why})"
    if shutil.which("cc") is None:
        return "there is no C compiler"
    return None


def lesser() -> list[str]:
    """The levels below this machine's own, the widest first."""
    found = flags()
    own = [name for name, flag in INSTRUCTION_SETS.items() if flag in found] + ["baseline"]
    return own[1:]


def environment(level: str) -> dict[str, str]:
    """What makes the processes that get it pass for a machine of this level.

    Raises:
        OSError, subprocess.CalledProcessError: what is preloaded cannot be compiled.
    """
    preloaded = f"{_library()}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    # What was compiled for more must not be found by those that pass for less.
    cache = str(_BUILD / level)
    return {
        "LD_PRELOAD": preloaded,
        "SEGREUSE_LESSER_CPU": level,
        "VLLM_CACHE_ROOT": cache,
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
    }


def flags() -> set[str]:
    """Those of /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


def _library() -> Path:
    """What is preloaded, compiled if its source is newer."""
    library = _BUILD / "preloaded.so"
    if not library.exists() or library.stat().st_mtime < _SOURCE.stat().st_mtime:
        _BUILD.mkdir(parents=True, exist_ok=True)
        made = _BUILD / f"preloaded.{os.getpid()}.so"
        flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        subprocess.run(["cc", *flags, str(_SOURCE), "-o", str(made), "-ldl"], check=True)
        made.replace(library)  # others may be using the old one
    return library


def main(argv: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="tests.lesser_cpu", description=__doc__)
    parser.add_argument("level", nargs="?", choices=LEVELS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    why, levels = refusal(), lesser()
    if given.level is None:
        if why:
            print(f"no lesser machine is tried: {why}", file=sys.stderr)
        else:
            print("\n".join(levels))
        return
    if why or given.level not in levels:
        parser.error(f"cannot pass for {given.level}: {why or 'this machine has no more itself'}")
    if not given.command:
        parser.error("which command?")
    os.execvpe(given.command[0], given.command, os.environ | environment(given.level))


if __name__ == "__main__":
    main(sys.argv[1:])
