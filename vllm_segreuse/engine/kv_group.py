# SPDX-License-Identifier: Apache-2.0
"""The KV cache group that segments are reused in, as vLLM's scheduler and its workers both see it.

vLLM allocates blocks by group of layers (`KVCacheConfig.kv_cache_groups`, `v1/kv_cache_interface`).
There is one group today; nothing outside of this file knows its index, or what a group must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_segreuse.engine.supported import WITHOUT, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV lies in blocks of one table.

    Attributes:
        index: of the group, in vLLM's lists by group.
        specs: vLLM's `KVCacheSpec` of each attention layer, by vLLM's name of it, in the group's
            order.
        block_size: tokens per block, in the scheduler's tables.
    """

    index: int
    specs: Mapping[str, Any]
    block_size: int

    @property
    def layer_names(self) -> list[str]:
        """vLLM's names of its attention layers."""
        return list(self.specs)

    def of(self, by_group: Sequence[Any]) -> Any:
        """The group's own entry of a list or tuple that vLLM keeps by group."""
        return by_group[self.index]


def segment_group(kv_cache_config: KVCacheConfig) -> KvGroup:
    """The group that segments are reused in: the only one, whose blocks are kept for all tokens.

    Its layers may still attend to a window only: without its hybrid KV cache manager, vLLM keeps
    all blocks for layers of both kinds, if there are both.

    Raises:
        RefusedError: the KV cache is of another shape; names what was found.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    specs = _by_layer(groups[0]) if len(groups) == 1 else {}
    known = (FullAttentionSpec, MLAAttentionSpec)
    if not specs or any(type(spec) not in known for spec in specs.values()):
        raise RefusedError(_other_shape(groups))
    for spec in specs.values():
        _check_spec(spec)
    block_size = groups[0].kv_cache_spec.block_size
    hash_block_size = kv_cache_config.hash_block_size or block_size
    if hash_block_size != block_size:
        raise RefusedError(
            f"blocks of {block_size} tokens are hashed in pieces of {hash_block_size}; leave "
            "the hash block size at its default"
        )
    return KvGroup(0, specs, block_size)


def _by_layer(group: KVCacheGroupSpec) -> dict[str, Any]:
    """The spec of each layer; layers whose heads differ in size have one each."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _other_shape(groups: Sequence[KVCacheGroupSpec]) -> str:
    """What was found instead, and the way out."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    kinds = {type(spec) for group in groups for spec in _by_layer(group).values()}
    if kinds == {SlidingWindowSpec}:
        return (
            "every layer of the model attends to a sliding window; limit prompts to the window "
            "with --disable-sliding-window, or serve this model without --segreuse"
        )
    if kinds == {FullAttentionSpec, SlidingWindowSpec}:
        return (
            "layers with a sliding window do not keep the blocks of all tokens; remove "
            "--no-disable-hybrid-kv-cache-manager"
        )
    found = ", ".join(sorted(kind.__name__ for kind in kinds))
    return (
        f"the model needs {len(groups)} KV cache groups ({found}), one group whose blocks are kept "
        f"for all tokens is supported{WITHOUT}"
    )


def _check_spec(spec: Any) -> None:
    if spec.non_causal:
        raise RefusedError(f"layers of the model attend to tokens behind their own{WITHOUT}")
