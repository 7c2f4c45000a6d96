# SPDX-License-Identifier: Apache-2.0
"""What it takes to keep all blocks of layers that attend to a window, beside what their windows
take."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    ConfigOf = Callable[[VllmConfig, dict[str, Any]], KVCacheConfig]


@dataclass(frozen=True)
class WindowedKv:
    """KV of one prompt of maximum length while its answer is generated, all ranks together.

    Attributes:
        layers: that attend to a window.
        all_layers: that have KV.
        window: tokens that the widest of them sees.
        prompt_tokens: of the prompt.
        bytes_all: with all blocks kept, as segment reuse has it by default.
        bytes_windows: with vLLM's hybrid KV cache manager, in its own groups of layers.
        keeps_windows: whether that one is on.
    """

    layers: int
    all_layers: int
    window: int
    prompt_tokens: int
    bytes_all: int
    bytes_windows: int
    keeps_windows: bool


def windowed_kv(
    vllm_config: VllmConfig, specs: Mapping[str, Any], config_of: ConfigOf
) -> WindowedKv | None:
    """That of a model; None: no layer attends to a window, or all do.

    Args:
        vllm_config: of one rank.
        specs: vLLM's `KVCacheSpec` of each layer.
        config_of: lays the KV cache out; it may change the specs.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    windows = [it.sliding_window for it in specs.values() if isinstance(it, SlidingWindowSpec)]
    if not windows or len(windows) == len(specs):
        return None
    scheduler = vllm_config.scheduler_config
    tokens = vllm_config.model_config.max_model_len
    asked, found = scheduler.disable_hybrid_kv_cache_manager, list[int]()
    for disabled in (True, False):
        scheduler.disable_hybrid_kv_cache_manager = disabled
        try:
            config = config_of(vllm_config, deepcopy(dict(specs)))
        finally:
            scheduler.disable_hybrid_kv_cache_manager = asked
        found.append(_held_bytes(config, tokens))
    everything, kept = found
    sizes = len(windows), len(specs), max(windows), tokens
    return WindowedKv(*sizes, everything, kept, asked is False)


def _held_bytes(config: KVCacheConfig, tokens: int) -> int:
    """Of a prompt of so many tokens, once its last step of prefill is over."""
    of_block = config.kv_cache_tensors[0].size // config.num_blocks
    groups: Sequence[Any] = config.kv_cache_groups
    return of_block * sum(held_blocks(group.kv_cache_spec, tokens) for group in groups)


def held_blocks(spec: Any, tokens: int) -> int:
    """Blocks of a group that a request of so many tokens holds while it generates the next one.

    Args:
        spec: of the group.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    passed = 0
    if isinstance(spec, SlidingWindowSpec):
        passed = max(0, tokens - spec.sliding_window + 1) // spec.block_size
    return int(-(-(tokens + 1) // spec.block_size)) - passed
