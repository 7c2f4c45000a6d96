# SPDX-License-Identifier: Apache-2.0
"""The C++ libraries, and the threads that they work with."""

from collections.abc import Iterator

import pytest

from vllm_segreuse.kernels import cpu


@pytest.fixture(params=[1, 2, 5])
def threads(built: str, request: pytest.FixtureRequest) -> Iterator[int]:
    """The library works with so many threads, whatever the machine has."""
    library = cpu.load_library()  # which finds OpenMP's functions, too
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(request.param)
    yield request.param
    library.omp_set_num_threads(before)
