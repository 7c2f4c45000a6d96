# SPDX-License-Identifier: Apache-2.0
"""Builds what carries plans out of the loaded model, and proves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segreuse_extras.states.capture import Captures
from segreuse_extras.states.kinds import state_layers
from segreuse_extras.states.layers import StateLayers
from segreuse_extras.states.options import StatesServer
from segreuse_extras.states.prefill import StatesPrefill
from segreuse_extras.states.proof import prove_states
from segreuse_extras.states.refusals import check_budget
from segreuse_extras.states.rotary import turn_rows
from segreuse_extras.states.rows import StateRows
from segreuse_extras.states.stack import StateStack
from vllm_segreuse.compat.lora_manager import Adapters
from vllm_segreuse.compat.model_runner import loaded_model, running_rows
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.engine.supported import WITHOUT, RefusedError
from vllm_segreuse.kernels import dispatch
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.model.attention_kind import kind_of
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.kv_format import check_format, typed_pages
from vllm_segreuse.model.kv_layout import PageLayoutError, discover_layout
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.rope import RopeError
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.prefill.align import Aligner
from vllm_segreuse.prefill.checks import Runtime
from vllm_segreuse.prefill.layer_runner import PassSettings
from vllm_segreuse.prefill.proofs.causal import check_attention
from vllm_segreuse.prefill.proofs.moves import prove_moves
from vllm_segreuse.prefill.proofs.rotations import check_rotated_channels, prove_rotations
from vllm_segreuse.prefill.proofs.scores import prove_scores
from vllm_segreuse.prefill.proofs.scratch import Scratch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SCRATCH_BLOCKS = 8
"""Blocks that the proofs of attention layers use, behind vLLM's own first one."""


def proven_states(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: ServerOptions,
    group: KvGroup,
) -> Runtime:
    """That of the loaded model.

    Raises:
        RefusedError: naming the layer or the property that could not be proven.
    """
    try:
        layers = state_layers(vllm_config, kv_cache_config, group)
        check_budget(StatesServer.of(config).state_bytes, layers.map_bytes)
        return _proven(vllm_config, kv_cache_config, group, layers)
    except (PageLayoutError, RopeError, UnsupportedModelError) as error:
        raise RefusedError(f"{error}{WITHOUT}") from error


def _proven(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    group: KvGroup,
    layers: StateLayers,
) -> Runtime:
    model, known = loaded_model(), vllm_config.compilation_config.static_forward_context
    attention = {name: known[name] for name in group.specs}
    check_attention(attention, group.block_size)
    check_format(attention.values())
    stack = StateStack(model, attention, vllm_config, group.block_size)
    check_rotated_channels(stack)
    turn_rows(stack.layers)
    layouts = [discover_layout(layer, group.block_size) for layer in stack.attention]
    rows = StateRows(vllm_config, kv_cache_config, attention, group)
    running = [1 + _SCRATCH_BLOCKS + number for number in range(layers.num_groups)]
    if kv_cache_config.num_blocks <= running[-1]:
        raise UnsupportedModelError(
            f"the KV cache has {kv_cache_config.num_blocks} blocks only; give it more memory"
        )
    rows.running = running
    most = int(vllm_config.scheduler_config.max_num_batched_tokens)
    settings = PassSettings(FastOps(model), Adapters(model), most)
    blocks = kv_cache_config.num_blocks
    scratch = Scratch(stack, layouts, rows, settings, group, blocks, vllm_config)
    captures = Captures(layers, running_rows)
    layers.observed_by(captures.observe)
    ropes = prove_rotations(scratch)
    first, max_model_len = typed_pages(stack.attention[0]), vllm_config.model_config.max_model_len
    kv = [
        LayerKv(
            layer,
            layout,
            rope,
            dispatch.choose(first.device, first.dtype, layout, vllm_config.model_config.dtype),
            kind_of(layer, max_model_len),
        )
        for layer, layout, rope in zip(stack.attention, layouts, ropes, strict=True)
    ]
    aligner = Aligner(kv, Codec.RAW)
    prove_moves(scratch, aligner, layouts, ropes)
    prove_scores(scratch, kv)
    prefill = StatesPrefill(stack, layers, rows, kv, aligner, captures, most)
    deviation = prove_states(scratch, prefill, running)
    return Runtime(prefill, deviation, kv[0].kernels.description, None, None)
