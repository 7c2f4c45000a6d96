# SPDX-License-Identifier: Apache-2.0
"""Keep vLLM's search for Triton kernels out of llvmlite.

On CPU, every worker start makes vLLM scan the attributes of all loaded modules
(`vllm/triton_utils/dispatcher.py`, `_rebind_kernels`), and the scan fails on llvmlite's library
handle, which invents any attribute it is asked for. We load llvmlite (through numba) into the
scheduler's process, so a second engine in that process would not start. Obsolete once the scan
checks what it got.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap the scan, once."""
    from vllm.triton_utils import dispatcher

    wrap(dispatcher, "_rebind_kernels", _rebind_kernels)


def _rebind_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    def _rebind_kernels(*args: Any, **kwargs: Any) -> Any:
        hidden = {n: sys.modules.pop(n) for n in list(sys.modules) if n.startswith("llvmlite")}
        try:
            return original(*args, **kwargs)
        finally:
            sys.modules.update(hidden)

    return _rebind_kernels
