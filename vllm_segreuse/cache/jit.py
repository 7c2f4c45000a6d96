# SPDX-License-Identifier: Apache-2.0
"""The one way this package compiles a hot loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def kernel(function: Function) -> Function:
    """Compile `function` on first use, keep the machine code on disk, run it without the GIL.

    numba invalidates its disk cache by the source file of the compiled function alone, so a kernel
    only calls kernels of its own file.
    """
    return cast(Function, numba.njit(cache=True, nogil=True)(function))
