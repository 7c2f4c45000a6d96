# SPDX-License-Identifier: Apache-2.0
"""Which C++ library is loaded, and what is said where there is none."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_segreuse.kernels import cpu


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("AMX", "amx"), ("AVX512", "avx512"), ("AVX2", "avx2"), ("DEFAULT", "baseline")],
)
def test_the_widest_library_that_machine_and_build_have(
    capability: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine runs no library for more than it has; without its own it runs the next one."""
    levels = ["amx", "avx512", "avx2", "baseline"]
    loaded: list[str] = []
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    monkeypatch.setattr(cpu, "capability", lambda: capability)
    monkeypatch.setattr(cpu, "_check_age", lambda *_: None)
    monkeypatch.setattr(
        cpu.ctypes, "CDLL", lambda path, mode: loaded.append(Path(path).name) or FakeLibrary()
    )
    for level in levels:
        (tmp_path / f"_cpu_{level}.so").touch()
    for level in levels[levels.index(expected) :]:
        cpu.load_library.__wrapped__()
        assert loaded[-1] == f"_cpu_{level}.so"
        (tmp_path / f"_cpu_{level}.so").unlink()
    with pytest.raises(OSError, match="were not built"):
        cpu.load_library.__wrapped__()


@pytest.mark.parametrize(
    ("vectors", "tiles", "bf16", "granted", "found"),
    [
        ("AVX512", True, True, True, "AMX"),
        ("AVX512", False, True, True, "AVX512"),
        ("AVX512", True, False, True, "AVX512"),
        ("AVX512", True, True, False, "AVX512"),
        ("AVX2", True, True, True, "AVX2"),
    ],
)
def test_a_matrix_unit_counts_if_all_of_it_is_there_and_the_system_grants_it(
    vectors: str,
    tiles: bool,
    bf16: bool,
    granted: bool,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: granted)
    assert cpu.capability() == found


def test_a_library_is_named_by_its_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load_library", lambda: SimpleNamespace(_name="/a/_cpu_avx2.so"))
    assert cpu.instruction_set() == "avx2"
    assert cpu.unavailable() is None


class FakeLibrary:
    """Has every function."""

    def __getattr__(self, name: str) -> "FakeLibrary":
        function = FakeLibrary()
        setattr(self, name, function)
        return function


def test_without_a_library_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "__file__", "/nowhere/cpu.py")
    cpu.load_library.cache_clear()
    try:
        assert "no compiler at installation" in str(cpu.unavailable())
    finally:
        cpu.load_library.cache_clear()


def test_a_library_of_another_version_is_not_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" void segreuse_sizes(long* sizes) { sizes[0] = 8; }')
    library = tmp_path / "_cpu_baseline.so"
    done = subprocess.run(["c++", "-shared", "-fPIC", source, "-o", library], check=False)
    if done.returncode:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    cpu.load_library.cache_clear()
    try:
        assert "install the package again" in str(cpu.unavailable())
    finally:
        cpu.load_library.cache_clear()
