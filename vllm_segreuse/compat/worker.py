# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/worker/{gpu,cpu}_worker.py`: boundary states take their part of the KV cache's memory.

vLLM gives the KV cache all memory that it finds to be left, and connectors cannot reserve any. The
states lie beside the KV, as many as it has slots, so that both share what is left in proportion.

Obsolete when connectors can reserve memory. None filed that we know of.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from vllm_segreuse.compat.patching import of_this_platform, wrap

_WORKERS = (
    ("vllm.v1.worker.gpu_worker", "Worker"),
    ("vllm.v1.worker.cpu_worker", "CPUWorker"),
)


def install() -> None:
    """Wrap `determine_available_memory` of vLLM's workers, once."""
    for module_name, class_name in of_this_platform(_WORKERS):
        worker = getattr(importlib.import_module(module_name), class_name)
        wrap(worker, "determine_available_memory", _beside_states)


def _beside_states(original: Callable[..., Any]) -> Callable[..., Any]:
    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_segreuse.launch import cuts_of
        from vllm_segreuse.memory import kv_bytes

        available = original(self, *args, **kwargs)
        cuts = cuts_of(self.vllm_config.kv_transfer_config)
        if not cuts:
            return available
        return kv_bytes(available, self.vllm_config, self.get_kv_cache_spec(), cuts)

    return determine_available_memory
