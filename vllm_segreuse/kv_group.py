# SPDX-License-Identifier: Apache-2.0
"""The KV cache group that segments are reused in, as vLLM's scheduler and its workers both see it.

vLLM allocates blocks by group of layers (`KVCacheConfig.kv_cache_groups`, `v1/kv_cache_interface`).
There is one group today; nothing outside of this file knows its index.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig


class AttentionKind(Enum):
    """Which tokens before its own a token of a layer attends to."""

    FULL = "all of them"


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV lies in blocks of one table.

    Attributes:
        index: of the group, in vLLM's lists by group.
        layer_names: vLLM's names of its attention layers, as the group lists them.
        block_size: tokens per block.
        kinds: what each of its layers attends to.
        spec: vLLM's `KVCacheSpec` of the group.
    """

    index: int
    layer_names: tuple[str, ...]
    block_size: int
    kinds: tuple[AttentionKind, ...]
    spec: Any

    def of(self, by_group: Sequence[Any]) -> Any:
        """The group's own entry of a list or tuple that vLLM keeps by group."""
        return by_group[self.index]


def segment_group(kv_cache_config: KVCacheConfig) -> KvGroup:
    """The group that segments are reused in; `supported.check_kv_cache` has made sure of it."""
    [group] = kv_cache_config.kv_cache_groups
    names = tuple(group.layer_names)
    kinds = (AttentionKind.FULL,) * len(names)
    return KvGroup(0, names, group.kv_cache_spec.block_size, kinds, group.kv_cache_spec)
