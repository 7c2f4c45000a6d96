# SPDX-License-Identifier: Apache-2.0
"""Which attention layers the pass reproduces: no proof would notice a window or a sink that the
scratch tokens do not reach."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.attention import Attention

from vllm_segreuse.model.layers import UnsupportedModelError


def check_attention(attention: dict[str, nn.Module], block_size: int) -> None:
    """Every layer must attend causally to all tokens before, in pages as large as blocks.

    Args:
        attention: vLLM `Attention` layers by name, KV caches bound.
        block_size: tokens per block of the scheduler.

    Raises:
        UnsupportedModelError: naming the layer and what it does.
    """
    for name, layer in attention.items():
        # Its subclasses attend to chunks, to another sequence, or in both directions.
        if type(layer) is not Attention:
            raise UnsupportedModelError(f"{name} is {type(layer).__name__}, not plain attention")
        kernel_tokens = layer.kv_cache.numel() // (
            layer.kv_cache.shape[0] * layer.num_kv_heads * 2 * layer.head_size
        )
        alibi = getattr(layer.impl, "alibi_slopes", None) is not None
        window = getattr(layer.impl, "sliding_window", None)
        for wrong, why in (
            (layer.sliding_window is not None, f"has a sliding window of {layer.sliding_window}"),
            (window not in (None, -1, (-1, -1)), f"has a sliding window of {window}"),
            (layer.has_sink, "has attention sinks"),
            (alibi, "has ALiBi positions"),
            (bool(getattr(layer.impl, "logits_soft_cap", 0)), "caps its attention logits"),
            (layer.kv_sharing_target_layer_name is not None, "shares the KV of another layer"),
            (layer.attn_type != "decoder", f"is {layer.attn_type} attention"),
            (layer.head_size_v != layer.head_size, "has values of another size than its keys"),
            (
                kernel_tokens != block_size,
                f"has pages of {kernel_tokens} tokens, the scheduler's have {block_size}",
            ),
        ):
            if wrong:
                raise UnsupportedModelError(f"{name} {why}")
