# SPDX-License-Identifier: Apache-2.0
"""The KV cache group that segments are reused in, as vLLM's scheduler and its workers both see it.

vLLM allocates blocks by group of layers (`KVCacheConfig.kv_cache_groups`, `v1/kv_cache_interface`).
There is one group today; nothing outside of this file knows its index, or what a group must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm_segreuse.supported import WITHOUT, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig


class AttentionKind(Enum):
    """Which tokens a token of a layer attends to."""

    FULL = "its own and all before it"


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV lies in blocks of one table.

    Attributes:
        index: of the group, in vLLM's lists by group.
        layers: the kind of each attention layer, by vLLM's name of it, in the group's order.
        block_size: tokens per block, in the scheduler's tables.
        spec: vLLM's `KVCacheSpec` of the group.
    """

    index: int
    layers: Mapping[str, AttentionKind]
    block_size: int
    spec: Any

    @property
    def layer_names(self) -> list[str]:
        """vLLM's names of its attention layers."""
        return list(self.layers)

    def of(self, by_group: Sequence[Any]) -> Any:
        """The group's own entry of a list or tuple that vLLM keeps by group."""
        return by_group[self.index]


def segment_group(kv_cache_config: KVCacheConfig) -> KvGroup:
    """The group that segments are reused in: the only one, of full attention, hashed by block.

    Raises:
        RefusedError: the KV cache is of another shape; names what was found.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise RefusedError(
            f"the model needs {len(groups)} KV cache groups ({', '.join(kinds)}), one group of "
            f"full attention is supported{WITHOUT}"
        )
    group = KvGroup(
        index=0,
        layers=dict.fromkeys(groups[0].layer_names, AttentionKind.FULL),
        block_size=groups[0].kv_cache_spec.block_size,
        spec=groups[0].kv_cache_spec,
    )
    _check_full(group.spec)
    hash_block_size = kv_cache_config.hash_block_size or group.block_size
    if hash_block_size != group.block_size:
        raise RefusedError(
            f"blocks of {group.block_size} tokens are hashed in pieces of {hash_block_size}; leave "
            "the hash block size at its default"
        )
    return group


def _check_full(spec: Any) -> None:
    """Without vLLM's hybrid KV cache manager other kinds of attention come as full, too."""
    for wrong, what in (
        (spec.sliding_window is not None, f"a sliding window of {spec.sliding_window} tokens"),
        (spec.attention_chunk_size is not None, f"chunks of {spec.attention_chunk_size} tokens"),
        (spec.non_causal, "tokens behind their own"),
    ):
        if wrong:
            raise RefusedError(f"layers of the model attend to {what}{WITHOUT}")
