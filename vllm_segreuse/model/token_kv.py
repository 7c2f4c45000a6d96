# SPDX-License-Identifier: Apache-2.0
"""What vLLM's attention layers keep of a token, and how it is written.

Most keep a key and a value of each KV head. Layers with multi-head latent attention (MLA, DeepSeek
V2, arXiv 2405.04434) keep one latent vector, of which keys and values of all heads are projections,
and one key that turns with the position. Here that key is *the key*, and the latent vector *the
value*: when tokens move, the one turns, and the other stays as it is, as elsewhere.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention


def is_latent(layer: torch.nn.Module) -> bool:
    """Whether a layer keeps latent vectors."""
    return isinstance(layer, MLAAttention)


def key_shape(layer: torch.nn.Module) -> tuple[int, int]:
    """Heads and channels of a token's key."""
    if is_latent(layer):
        return 1, layer.qk_rope_head_dim
    return layer.num_kv_heads, layer.head_size


def value_shape(layer: torch.nn.Module) -> tuple[int, int]:
    """Heads and channels of a token's value."""
    if is_latent(layer):
        return 1, layer.kv_lora_rank
    return layer.num_kv_heads, layer.head_size


def given(
    layer: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[tokens, heads, channels]` among the arguments of a layer's forward."""
    named = _signature(type(layer).forward).bind(layer, *args, **kwargs).arguments
    key, value = ("k_pe", "kv_c_normed") if is_latent(layer) else ("key", "value")
    return named[key].view(-1, *key_shape(layer)), named[value].view(-1, *value_shape(layer))


@functools.cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Of a class's forward. Kept: passes ask for it in every chunk."""
    return inspect.signature(forward)


def write(
    layer: torch.nn.Module, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Have the backend write keys and values `[tokens, heads, channels]` to slots of its cache."""
    update = layer.impl.do_kv_cache_update
    if is_latent(layer):
        latent = values.flatten(1)
        update(latent, keys, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)
    else:
        update(layer, keys, values, layer.kv_cache, slots)


def query_channels(layer: torch.nn.Module) -> int:
    """Channels of a head's query, as the layer is given it."""
    channels: int = layer.qk_head_dim if is_latent(layer) else layer.head_size
    return channels


def attend(
    layer: torch.nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Run a layer on tokens, in vLLM's forward context.

    Args:
        layer: an attention layer.
        query: `[tokens, heads, channels]`; see `query_channels`.
        keys, values: `[tokens, heads, channels]`, which it writes.

    Returns:
        `[tokens, heads, channels]`.
    """
    if is_latent(layer):
        shape = torch.Size((len(query), layer.num_heads * layer.v_head_dim))
        output = layer(query, values.flatten(1), keys, output_shape=shape)
    else:
        output = layer(query.flatten(1), keys.flatten(1), values.flatten(1))
    return output.view(len(query), layer.num_heads, -1)


def output_of(layer: torch.nn.Module, mixed: torch.Tensor) -> torch.Tensor:
    """What a layer returns where its heads mix values to these: `[tokens, heads, channels]`."""
    if not is_latent(layer):
        return mixed
    output = mixed.new_empty(len(mixed), layer.num_heads * layer.v_head_dim)
    layer._v_up_proj(mixed, out=output)
    return output.view(len(mixed), layer.num_heads, -1)
