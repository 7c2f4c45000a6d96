# SPDX-License-Identifier: Apache-2.0
"""A command runs as on a machine with fewer instruction sets, with all that it starts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import lesser_cpu

OWN = [] if lesser_cpu.refusal() else lesser_cpu.lesser()

# In a process below: what torch, vLLM's backend and our kernels take the machine for.
ASKED = """
import json, subprocess, sys
if len(sys.argv) > 1:
    sys.exit(subprocess.run([sys.executable, sys.argv[0]]).returncode)
import torch
from vllm_segreuse.kernels import cpu
print(json.dumps({
    "torch": torch.backends.cpu.get_cpu_capability(),
    "bf16": torch.cpu._is_avx512_bf16_supported(),
    "amx": torch.cpu._is_amx_tile_supported(),
    "ours": cpu.unavailable() or cpu.instruction_set(),
}))
"""
FOUND = {
    "avx512_bf16": {"torch": "AVX512", "bf16": True, "amx": False, "ours": "avx512"},
    "avx512": {"torch": "AVX512", "bf16": False, "amx": False, "ours": "avx512"},
    "avx2": {"torch": "AVX2", "bf16": False, "amx": False, "ours": "avx2"},
    "baseline": {"torch": "DEFAULT", "bf16": False, "amx": False, "ours": "baseline"},
}


def run_as(level: str, *command: str) -> subprocess.CompletedProcess[str]:
    """By the command line."""
    if level not in OWN:
        why = lesser_cpu.refusal() or f"this machine has no more than {level}"
        pytest.skip(why)
    if os.environ.get("SEGREUSE_LESSER_CPU"):
        pytest.skip(f"this is a machine of {os.environ['SEGREUSE_LESSER_CPU']} already")
    arguments = [sys.executable, "-m", "tests.lesser_cpu", level, *command]
    root = Path(__file__).parents[1]
    return subprocess.run(arguments, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("level", lesser_cpu.LEVELS)
def test_a_process_of_a_process_knows_of_the_level_only(level: str, tmp_path: Path) -> None:
    script = tmp_path / "asked.py"
    script.write_text(ASKED)
    done = run_as(level, sys.executable, "-X", "faulthandler", str(script), "below")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if "not built" in found["ours"]:
        pytest.skip(found["ours"])
    assert found == FOUND[level]


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")], ids=str)
def test_a_real_fault_is_one(options: tuple[str, ...]) -> None:
    code = "import ctypes, hashlib; ctypes.string_at(0)"
    done = run_as("baseline", sys.executable, *options, "-c", code)
    assert done.returncode == -signal.SIGSEGV
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == bool(options)


def test_more_than_the_machine_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesser_cpu, "refusal", lambda: None)
    monkeypatch.setattr(lesser_cpu, "lesser", lambda: ["baseline"])
    with pytest.raises(SystemExit) as found:
        lesser_cpu.main(["avx2", "true"])
    assert found.value.code == 2
    assert "cannot pass for avx2: this machine has no more itself" in capsys.readouterr().err


def test_where_it_cannot_be_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesser_cpu, "refusal", lambda: "CPUID cannot be trapped")
    lesser_cpu.main([])
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "no lesser machine is tried: CPUID cannot be trapped\n")
    with pytest.raises(SystemExit):
        lesser_cpu.main(["avx2", "true"])
    assert "cannot pass for avx2: CPUID cannot be trapped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "below"),
    [
        ("amx_bf16 avx512_bf16 avx512f avx2", ["avx512_bf16", "avx512", "avx2", "baseline"]),
        ("avx512f avx2 fma", ["avx2", "baseline"]),
        ("avx2", ["baseline"]),
        ("sse4_2", []),
    ],
)
def test_the_levels_below_a_machine(
    flags: str, below: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lesser_cpu, "flags", lambda: set(flags.split()))
    assert lesser_cpu.lesser() == below
