# SPDX-License-Identifier: Apache-2.0
"""The C++ libraries, one for each instruction set that this machine has: fixtures of every test,
which need not import torch otherwise."""

from collections.abc import Iterator

import pytest

_SETS = {"amx": "AMX", "avx512": "AVX512", "avx2": "AVX2", "baseline": "DEFAULT"}
_ORDER = list(_SETS)


@pytest.fixture(scope="session")
def widest() -> str:
    """The instruction set of this machine, before a test pretends that it has another."""
    from vllm_segreuse.kernels import cpu

    return next((name for name, known in _SETS.items() if known == cpu.capability()), "baseline")


@pytest.fixture(scope="module", params=_ORDER)
def built(request: pytest.FixtureRequest, widest: str) -> Iterator[str]:
    """Each library in turn; the machine's own capability decides which may run."""
    from vllm_segreuse.kernels import cpu

    if _ORDER.index(request.param) < _ORDER.index(widest):
        pytest.skip(f"this machine has no {request.param}")
    if cpu.unavailable():
        pytest.skip(str(cpu.unavailable()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "capability", lambda: _SETS[request.param])
        cpu.load_library.cache_clear()
        assert cpu.instruction_set() == request.param
        yield request.param
    cpu.load_library.cache_clear()
