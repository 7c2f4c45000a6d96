# SPDX-License-Identifier: Apache-2.0
"""`vllm/triton_utils/dispatcher.py`: the search for Triton kernels is kept out of llvmlite.

On CPU, every worker start makes vLLM scan the attributes of all loaded modules
(`_rebind_kernels`), and the scan fails on llvmlite's library
handle, which has any attribute that it is probed for. We load llvmlite (through numba) into the
scheduler's process, so a second engine in that process would not start.

Obsolete when vLLM's scan for Triton kernels checks the type of what it found. None filed that we
know of; the dispatcher itself is vllm-project/vllm#45133.
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
