# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for GPUs that are not there, from exactly what a launcher passes."""

from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature


class Compiled:
    """Stands in for a kernel: a launch compiles it for `arch` (80 for sm_80), and runs nothing.

    Takes the steps of `JITFunction.run` up to the compilation, so that arguments are specialised
    (ones, multiples of 16) as they are in a launch.

    Attributes:
        results: what the launches were compiled to.
        variants: what a launch is recognised by; launches with the same share a compilation.
    """

    def __init__(self, kernel: Any, arch: int) -> None:
        self._kernel = kernel
        self._target = GPUTarget("cuda", arch, 32)
        self._backend = make_backend(self._target)
        self._bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        self.results: list[Any] = []
        self.variants: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid)
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        bound, specialization, given = self._bind(*args, **kwargs)
        self.variants.add(compute_cache_key({}, specialization, given))
        options, signature, constants, attributes = self._kernel._pack_args(
            self._backend, kwargs, bound, specialization, given
        )
        source = ASTSource(self._kernel, signature, constants, attributes)
        self.results.append(triton.compile(source, target=self._target, options=options.__dict__))


def can_compile() -> bool:
    """Whether triton has its NVIDIA backend, and that an assembler."""
    try:
        make_backend(GPUTarget("cuda", 80, 32))
        return Path(triton.knobs.nvidia.ptxas.path).is_file()
    except Exception:  # whatever is missing, there is nothing to test here
        return False
