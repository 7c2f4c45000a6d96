# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/attention/backends/*`: attention layers that compute by a function of ours for a while.

Everything around it stays the layer's own: reshaping, the write of keys and values into the cache,
tensor parallelism.

Obsolete when a forward context can name the attention function of its layers, or a backend takes
queries at scattered positions. None filed that we know of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

CHECKED = ("0.32", "0.33")


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
def replaced_forward(impls: Sequence[Any], forward: Callable[..., Any]) -> Iterator[None]:
    """Has `forward(layer, query, key, value, kv_cache, metadata, output, ...)` compute attention.

    Args:
        impls: `layer.impl` of vLLM's attention layers.
    """
    for impl in impls:
        if not callable(getattr(type(impl), "forward", None)):
            raise RuntimeError(
                f"segment reuse has to replace {type(impl).__qualname__}.forward, which this vLLM "
                "does not have; install a supported vLLM, or start without segment reuse"
            )
        impl.forward = forward  # hides the class's own
    try:
        yield
    finally:
        for impl in impls:
            del impl.forward
