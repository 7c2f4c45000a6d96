# SPDX-License-Identifier: Apache-2.0
"""Layers that share the KV of others find the spec of their target, and no memory is added up for
them."""

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import attn_utils

from tests.compat.registering import register

CALLERS = (gpu_model_runner, attn_utils)
SPECS = {
    name: FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=size, dtype=torch.float32)
    for name, size in (("narrow", 32), ("wide", 64))
}
SHARED = {"also narrow": "narrow", "also wide": "wide"}


def groups(spec: Any) -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec([*SPECS], spec)]


@pytest.mark.parametrize("runner", CALLERS)
def test_layers_that_share_kv_have_the_spec_of_their_target(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in CALLERS:
        plain: Any = module.add_kv_sharing_layers_to_kv_cache_groups
        plain = getattr(plain, "__wrapped__", plain)
        monkeypatch.setattr(module, "add_kv_sharing_layers_to_kv_cache_groups", plain)
    register(monkeypatch, "worker_utils")
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=dict(SPECS))
    [group] = found = groups(uniform)
    runner.add_kv_sharing_layers_to_kv_cache_groups(SHARED, found)
    assert group.layer_names == [*SPECS, *SHARED]
    of_group: Any = group.kv_cache_spec
    for name in group.layer_names:
        assert of_group.kv_cache_specs[name] == SPECS[SHARED.get(name, name)]
    assert of_group.page_size_bytes == uniform.page_size_bytes
    assert uniform.kv_cache_specs == SPECS, "that of the scheduler stays as it was"
    with pytest.raises(KeyError):
        of_group.kv_cache_specs["unknown"]
    [plain_group] = found = groups(SPECS["wide"])
    runner.add_kv_sharing_layers_to_kv_cache_groups(SHARED, found)
    assert plain_group.kv_cache_spec is SPECS["wide"]
