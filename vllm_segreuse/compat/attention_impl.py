# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/attention/backends/*`: attention layers that compute by a function of ours for a while.

Everything around it stays the layer's own: reshaping, the write of keys and values into the cache,
tensor parallelism.

Obsolete when a forward context can name the attention function of its layers, or a backend takes
queries at scattered positions. None filed that we know of.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch


@contextlib.contextmanager
def queries_as_computed(layers: Sequence[Any]) -> Iterator[None]:
    """Attention layers that quantise their queries, beside fp8 caches, do not for a while.

    Args:
        layers: vLLM's attention layers.
    """
    quantising = [layer.query_quant for layer in layers]
    for layer in layers:
        layer.query_quant = None
    try:
        yield
    finally:
        for layer, quantise in zip(layers, quantising, strict=True):
            layer.query_quant = quantise


@contextlib.contextmanager
def replaced_forward(layers: Sequence[Any], forward: Callable[..., Any]) -> Iterator[None]:
    """Has `forward(layer, query, key, value, kv_cache, metadata, output, ...)` compute attention.

    Args:
        layers: vLLM's attention layers. Of latent ones, key and value are the latent vectors and
            the rotary keys.
    """
    computing = [_computing(layer) for layer in layers]
    for owner, name in computing:
        if not callable(getattr(type(owner), name, None)):
            raise RuntimeError(
                f"segment reuse has to replace {type(owner).__qualname__}.{name}, which this vLLM "
                "does not have; install a supported vLLM, or start without segment reuse"
            )
    for layer, (owner, name) in zip(layers, computing, strict=True):
        of_impl = owner is layer.impl  # is given the layer by vLLM
        # Hides the class's own.
        setattr(owner, name, forward if of_impl else functools.partial(forward, layer))
    try:
        yield
    finally:
        for owner, name in computing:
            delattr(owner, name)


def stock_forward(layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention as vLLM computes it, called with what `replaced_forward` gives its function."""
    owner, name = _computing(layer)
    own = getattr(type(owner), name)
    given = (layer, query) if owner is layer.impl else (query,)
    output: torch.Tensor = own(owner, *given, *args, **kwargs)
    return output


def absorbed_queries(layer: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries of a latent layer as they attend to latent vectors and rotary keys.

    The up-projection of keys is multiplied into them. Every backend keeps these weights in its own
    way, so the layer itself is run, as for tokens that are decoded, up to where it attends.

    Args:
        layer: one of vLLM's `MLAAttention`.
        query: `[tokens, heads, channels]`, as the layer is given them.

    Returns:
        `[tokens, heads, latent channels + rotary channels]`.
    """

    def caught(absorbed: Any, *_: Any) -> None:
        raise _Absorbed(torch.cat(absorbed, -1) if isinstance(absorbed, tuple) else absorbed)

    count = len(query)
    if not count:
        return query.new_empty(0, layer.num_heads, layer.head_size)
    decoding = SimpleNamespace(
        num_actual_tokens=count,
        num_decodes=count,
        num_prefills=0,
        num_decode_tokens=count,
        decode=(),
        prefill=None,
    )
    output = query.new_empty(count, layer.num_heads * layer.v_head_dim)
    layer.impl.forward_mqa = caught
    try:
        type(layer).forward_impl(
            layer, query, query, query, layer.kv_cache, decoding, output=output
        )
    except _Absorbed as absorbed:
        return absorbed.queries
    finally:
        del layer.impl.forward_mqa
    raise RuntimeError(
        f"{type(layer).__qualname__}.forward_impl of this vLLM does not attend by "
        f"{type(layer.impl).__qualname__}.forward_mqa; install a supported vLLM, or start without "
        "segment reuse"
    )


class _Absorbed(BaseException):
    """Unwinds a latent layer once its queries are about to attend."""

    def __init__(self, queries: torch.Tensor) -> None:
        super().__init__()
        self.queries = queries


def _computing(layer: Any) -> tuple[Any, str]:
    """What computes the attention of a layer: a method of its backend, or, where it is latent, of
    the layer itself, which shares the tokens out among two methods of the backend."""
    if hasattr(type(layer), "forward_impl"):
        return layer, "forward_impl"
    return layer.impl, "forward"
