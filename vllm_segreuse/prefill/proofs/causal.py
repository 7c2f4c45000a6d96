# SPDX-License-Identifier: Apache-2.0
"""Which attention layers the pass reproduces: causal ones, over the whole prompt, a window or a
chunk."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from vllm import envs
from vllm.model_executor.layers.attention import (
    Attention,
    ChunkedLocalAttention,
    MLAAttention,
)
from vllm.platforms import current_platform

from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.model.attention_kind import of_impl
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.token_kv import is_latent
from vllm_segreuse.plan import ModelLayers


def check_attention(attention: dict[str, nn.Module], block_size: int) -> None:
    """Every layer must attend causally, in pages as large as blocks.

    Args:
        attention: vLLM `Attention` layers by name, KV caches bound.
        block_size: tokens per block of the scheduler.

    Raises:
        UnsupportedModelError: naming the layer and what it does.
    """
    check_classes(attention)
    for name, layer in attention.items():
        halves = 1 if is_latent(layer) else 2
        kernel_tokens = layer.kv_cache.numel() // (
            layer.kv_cache.shape[0] * layer.num_kv_heads * halves * layer.head_size
        )
        chunk = getattr(layer, "attention_chunk_size", None) or block_size
        window, of_backend = layer.sliding_window, _window_of_backend(layer)
        for wrong, why in (
            (
                window != of_backend,
                f"has a sliding window of {window}, its backend of {of_backend}",
            ),
            (of_impl(layer, "alibi_slopes") is not None, "has ALiBi positions"),
            *(_latent_faults(layer) if is_latent(layer) else _plain_faults(layer)),
            (
                chunk % block_size != 0,
                f"attends to chunks of {chunk} tokens, which are no whole blocks of {block_size}; "
                "set --block-size to a divisor",
            ),
            (
                kernel_tokens != block_size,
                f"has pages of {kernel_tokens} tokens, the scheduler's have {block_size}",
            ),
        ):
            if wrong:
                raise UnsupportedModelError(f"{name} {why}")


def check_classes(layers: Mapping[str, nn.Module]) -> None:
    """Layers with a KV cache must be plain attention.

    Raises:
        UnsupportedModelError: naming the first that is not.
    """
    for name, layer in layers.items():
        # Its other subclasses attend to another sequence, or in both directions.
        if type(layer) not in (Attention, ChunkedLocalAttention, MLAAttention):
            raise UnsupportedModelError(f"{name} is {type(layer).__name__}, not plain attention")


def _plain_faults(layer: nn.Module) -> list[tuple[bool, str]]:
    return [
        (
            layer.has_sink != (of_impl(layer, "sinks") is not None),
            "has attention sinks that its backend does not show",
        ),
        (layer.attn_type != "decoder", f"is {layer.attn_type} attention"),
        (layer.head_size_v != layer.head_size, "has values of another size than its keys"),
    ]


def _latent_faults(layer: nn.Module) -> list[tuple[bool, str]]:
    return [
        (layer.use_sparse or layer.impl.is_sparse, "attends to the tokens that an indexer chooses"),
        (layer.qk_rope_head_dim == 0, "has keys that carry no position"),
    ]


def sharing_layers(layers: Mapping[str, nn.Module], has_draft: bool) -> dict[str, nn.Module]:
    """Layers that read the KV of another and write none, by name.

    vLLM adds them to the group only after the connector has seen it.

    Args:
        layers: all that vLLM knows by name (`static_forward_context`), of whatever kind.
        has_draft: whether some of them are of a draft.

    Raises:
        UnsupportedModelError: there are some, and a draft, too: a pass ends in front of them, and
            has no output that a draft could be given.
    """
    found = {
        name: layer
        for name, layer in layers.items()
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None
    }
    if found and has_draft:
        raise UnsupportedModelError(
            f"{next(iter(found))} shares the KV of another layer, which is not proven beside a "
            "draft that has KV"
        )
    return found


def _window_of_backend(layer: nn.Module) -> int | None:
    """Most keys that a query sees; some backends count those before its own, and behind it."""
    found = of_impl(layer, "sliding_window")
    keys = found[0] + 1 if isinstance(found, tuple) else found
    return keys if keys is not None and keys > 0 else None


def check_split_keys(attention: Mapping[str, nn.Module]) -> None:
    """vLLM's CPU backend must not divide keys among threads where there are attention sinks.

    With its hybrid KV cache manager off, as it is for this connector, and more threads than one,
    vLLM 0.32 itself then answers one prompt differently from run to run: log-probabilities of a
    small gpt-oss were off by up to 1.

    Raises:
        RefusedError: there are sinks, and it may.
    """
    sinks = any(of_impl(layer, "sinks") is not None for layer in attention.values())
    if sinks and current_platform.is_cpu() and envs.VLLM_CPU_ATTN_SPLIT_KV:
        raise RefusedError(
            "the model has attention sinks, with which vLLM's CPU backend is wrong where it "
            "divides keys among threads; set VLLM_CPU_ATTN_SPLIT_KV=0"
        )


def check_scored(layers: ModelLayers, num_stages: int) -> None:
    """Some layer before the last must attend to the whole prompt: tokens are chosen by it. Of
    several pipeline stages the first must have one (`layers` are its own): `sparsex` chooses there.

    It is so whatever the server's policy is: a request may ask for any, and start-up proves all.

    Raises:
        UnsupportedModelError: there is none.
    """
    if not layers.scored:
        first = "of the first pipeline stage (VLLM_PP_LAYER_PARTITION gives it more)"
        where = "before the last one" if num_stages == 1 else first
        raise UnsupportedModelError(f"no layer {where} attends to the whole prompt")
