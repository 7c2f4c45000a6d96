# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/worker/utils.py`: layers that share the KV of others have a spec where heads differ.

Where layers differ in the size of their heads, and the hybrid KV cache manager is off, as it is for
every connector that does not take groups of layers, vLLM keeps one spec per layer
(`UniformTypeKVCacheSpecs`). It adds the layers that share KV to the group of their target, but no
spec of theirs, looks that up all the same, and ends with a `KeyError`: Gemma 4 E2B and E4B do not
start with any such connector.

Obsolete when vLLM looks the target's up (vllm-project/vllm#43533).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap `add_kv_sharing_layers_to_kv_cache_groups` where runners (V1, V2) have imported it,
    once."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import attn_utils

    wrap(gpu_model_runner, "add_kv_sharing_layers_to_kv_cache_groups", _with_specs)
    wrap(attn_utils, "add_kv_sharing_layers_to_kv_cache_groups", _with_specs)


def _with_specs(original: Callable[..., None]) -> Callable[..., None]:
    def add_kv_sharing_layers_to_kv_cache_groups(
        shared_kv_cache_layers: Mapping[str, str],
        kv_cache_groups: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(shared_kv_cache_layers, kv_cache_groups, *args, **kwargs)
        for group in kv_cache_groups:
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            if specs is not None:
                found = _Specs(specs, shared_kv_cache_layers)
                group.kv_cache_spec = replace(group.kv_cache_spec, kv_cache_specs=found)

    return add_kv_sharing_layers_to_kv_cache_groups


class _Specs(dict[str, Any]):
    """Specs by layer, which finds the target's for a layer that shares its KV. That is no entry: a
    page is as large as all entries together."""

    def __init__(self, specs: Mapping[str, Any], targets: Mapping[str, str]) -> None:
        super().__init__(specs)
        self._targets = targets

    def __missing__(self, name: str) -> Any:
        return self[self._targets[name]]
