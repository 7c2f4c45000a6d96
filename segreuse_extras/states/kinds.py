# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's layers hand on a state that is composed, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from segreuse_extras.states.delta_rule import DeltaRuleLayer
from segreuse_extras.states.layers import StateLayer, StateLayers
from segreuse_extras.states.mamba2 import Mamba2Layer
from segreuse_extras.states.short_conv import ShortConvLayer
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.model.modules import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KINDS: dict[type, type[StateLayer]] = {
    QwenGatedDeltaNetAttention: DeltaRuleLayer,
    MambaMixer2: Mamba2Layer,
    ShortConv: ShortConvLayer,
}
"""By vLLM's class, and no other: a subclass may compute something else."""


def state_layer(name: str, layer: Any, group: int) -> StateLayer:
    """One of vLLM's layers, its cache bound.

    Args:
        name: vLLM's.
        layer: vLLM's.
        group: which group of states has it, from 0 on.

    Raises:
        UnsupportedModelError: states of this layer are not composed.
    """
    kind = KINDS.get(type(layer))
    if kind is None:
        *known, last = (it.__name__ for it in KINDS)
        raise UnsupportedModelError(
            f"{name} is {type(layer).__name__}, and states are composed of {', '.join(known)} and "
            f"{last} only"
        )
    return kind(name, group, layer)


def state_layers(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: KvGroup
) -> StateLayers:
    """Those of a loaded model.

    Raises:
        UnsupportedModelError: naming the first whose states are not composed.
    """
    known = vllm_config.compilation_config.static_forward_context
    found = [
        state_layer(name, known[name], number)
        for number, index in enumerate(group.states)
        for name in kv_cache_config.kv_cache_groups[index].layer_names
    ]
    return StateLayers(found, len(group.states))
