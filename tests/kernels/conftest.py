# SPDX-License-Identifier: Apache-2.0
"""The C++ libraries, one for each instruction set that this machine has."""

from collections.abc import Iterator

import pytest

from vllm_segreuse.kernels import cpu

_SETS = {"amx": "AMX", "avx512": "AVX512", "avx2": "AVX2", "baseline": "DEFAULT"}
_ORDER = list(_SETS)


@pytest.fixture(scope="module", params=_ORDER)
def built(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each library in turn; the machine's own capability decides which may run."""
    best = next((name for name, known in _SETS.items() if known == cpu.capability()), "baseline")
    if _ORDER.index(request.param) < _ORDER.index(best):
        pytest.skip(f"this machine has no {request.param}")
    if cpu.unavailable():
        pytest.skip(str(cpu.unavailable()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "capability", lambda: _SETS[request.param])
        cpu._library.cache_clear()
        assert cpu.instruction_set() == request.param
        yield request.param
    cpu._library.cache_clear()


@pytest.fixture(params=[1, 2, 5])
def threads(built: str, request: pytest.FixtureRequest) -> Iterator[int]:
    """The library works with so many threads, whatever the machine has."""
    library = cpu._library()  # which finds OpenMP's functions, too
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(request.param)
    yield request.param
    library.omp_set_num_threads(before)
