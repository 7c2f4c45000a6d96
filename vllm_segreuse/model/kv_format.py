# SPDX-License-Identifier: Apache-2.0
"""How attention layers store keys and values: as they are, or in fp8, divided by a scale.

vLLM's fp8 caches are tensors of bytes, written by the backend (`do_kv_cache_update`). Which numbers
these bytes stand for is known by the layer alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from vllm.platforms import current_platform

from vllm_segreuse.engine.supported import KV_CACHE_DTYPES
from vllm_segreuse.kernels.arguments import FP8
from vllm_segreuse.kernels.pages import flat_pages
from vllm_segreuse.model.modules import UnsupportedModelError

_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class KvScales:
    """What stored numbers are multiplied by to give keys and values; 1 where nothing is scaled."""

    key: float = 1.0
    value: float = 1.0


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether elements of this type are one of vLLM's two kinds of fp8."""
    return dtype in FP8


def typed_pages(layer: torch.nn.Module) -> torch.Tensor:
    """Flat pages `[num_blocks, page_elements]` of a layer, in the type of what they hold.

    Args:
        layer: a vLLM `Attention` layer whose `kv_cache` is bound.
    """
    return flat_pages(layer.kv_cache).view(stored_dtype(layer))


def stored_dtype(layer: torch.nn.Module) -> torch.dtype:
    """The type of the numbers that a layer's cache holds."""
    cache: torch.Tensor = layer.kv_cache
    return _FP8.get(layer.kv_cache_dtype, cache.dtype)


def kv_scales(layer: torch.nn.Module) -> KvScales:
    """The scales of a layer, as its backend applies them."""
    if layer.kv_cache_dtype not in _FP8:
        return KvScales()
    return KvScales(layer._k_scale_float, layer._v_scale_float)


def plain_queries(layer: torch.nn.Module, query: torch.Tensor) -> torch.Tensor:
    """Queries in the layer's own type: beside fp8 pages, some GPU backends have them quantised."""
    if not is_fp8(query.dtype):
        return query
    return (query.float() * layer._q_scale_float).to(layer.dtype)


def check_format(layers: Iterable[torch.nn.Module]) -> None:
    """All layers must store the same type of numbers, by one scale for keys and one for values.

    Raises:
        UnsupportedModelError: naming the layer and how it stores them.
    """
    found: dict[torch.dtype, str] = {}
    for layer in layers:
        for wrong, why in _faults(layer):
            if wrong:
                raise UnsupportedModelError(f"{layer.layer_name} {why}")
        found.setdefault(stored_dtype(layer), layer.layer_name)
    if len(found) > 1:
        kinds = ", ".join(f"{name} in {dtype}" for dtype, name in found.items())
        raise UnsupportedModelError(f"layers differ in how they store keys and values ({kinds})")


def _faults(layer: torch.nn.Module) -> list[tuple[bool, str]]:
    kind = layer.kv_cache_dtype
    if kind not in _FP8:
        return [(kind not in KV_CACHE_DTYPES, f"stores keys and values as {kind}")]
    scales = kv_scales(layer)
    per_head = max(layer._k_scale.numel(), layer._v_scale.numel())
    return [
        (current_platform.is_fp8_fnuz(), "stores keys and values in the fp8 of older AMD GPUs"),
        (per_head > 1, f"has {per_head} scales for its keys and values, one is supported"),
        *(
            (not (math.isfinite(scale) and scale > 0), f"has a scale of {scale} for its {what}")
            for what, scale in (("keys", scales.key), ("values", scales.value))
        ),
    ]
