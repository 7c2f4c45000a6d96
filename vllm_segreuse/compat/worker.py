# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/worker/{gpu,cpu}_worker.py`: boundary states take their part of the KV cache's memory.

vLLM gives the KV cache all memory that it finds to be left, and connectors cannot reserve any. The
states lie beside the KV, as many as it has slots, so that both share what is left in proportion.

Obsolete when connectors can reserve memory. None filed that we know of.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from vllm_segreuse.compat.patching import of_this_platform, wrap

WORKERS = (
    ("vllm.v1.worker.gpu_worker", "Worker"),
    ("vllm.v1.worker.cpu_worker", "CPUWorker"),
)
"""Module and name of each class whose method is wrapped."""

LeftForKv = Callable[[int, Any, Mapping[str, Any]], int]
"""Bytes for the KV cache, of so many that are available, with a `VllmConfig` and the `KVCacheSpec`
of each layer."""


def install(left_for_kv: LeftForKv) -> None:
    """Wrap `determine_available_memory` of vLLM's workers, once."""
    for module_name, class_name in of_this_platform(WORKERS):
        worker = getattr(importlib.import_module(module_name), class_name)
        wrap(worker, "determine_available_memory", _beside_states, left_for_kv)


def _beside_states(original: Callable[..., Any], left_for_kv: LeftForKv) -> Callable[..., Any]:
    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        available = original(self, *args, **kwargs)
        return left_for_kv(available, self.vllm_config, self.get_kv_cache_spec())

    return determine_available_memory
