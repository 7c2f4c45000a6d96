# SPDX-License-Identifier: Apache-2.0
"""The kernels of the pass compute over long contexts what plain torch computes.

A prompt of scratch tokens is a step or two of a Triton program. What it loads steps ahead, and what
several programs find out about one query, only shows over more. So made-up pages of one layer stand
for a context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_segreuse.kernels import reference
from vllm_segreuse.model.kv_format import kv_scales
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.prefill.proofs.scratch import relative_error, tolerance

CONTEXT = 2048
QUERIES = 80
_SPLITS = 3


@torch.inference_mode()
def prove_long_contexts(layers: list[LayerKv], dtype: torch.dtype) -> None:
    """Attention of scattered queries, and scores, at a layer of each kind.

    Args:
        layers: of the model.
        dtype: of their queries.

    Raises:
        UnsupportedModelError: they are off by more than rounding.
    """
    alike: dict[Any, LayerKv] = {}
    for known in layers:
        if known.kernels.sparse_attention is not None:
            shape = (known.layout, known.pages.dtype, known.attention.num_heads, known.kind)
            alike.setdefault(shape, known)
    for known in alike.values():
        for what, found, expected in _computed(known, dtype):
            error = relative_error(found, expected)
            if not error <= tolerance(dtype):
                raise UnsupportedModelError(
                    f"{known.attention.layer_name}: over {CONTEXT} tokens {what} what plain torch "
                    f"computes (off by {error:.2g} of its norm)"
                )


def _computed(
    known: LayerKv, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What is computed, by the kernels and, in float32, by plain torch."""
    layer, kernels, layout = known.attention, known.kernels, known.layout
    device = known.pages.device
    generator = torch.Generator().manual_seed(0)
    blocks = CONTEXT // layout.keys.shape[1]
    size = (blocks, known.pages.shape[1])
    pages = torch.randn(size, generator=generator).to(device, known.pages.dtype)
    table = torch.randperm(blocks, generator=generator).to(device, torch.int32)
    # None of the first: programs have steps in which nothing is masked.
    later = torch.randperm(CONTEXT * 3 // 4, generator=generator)[:QUERIES].sort().values
    positions = (later + CONTEXT // 4).to(device)
    shape = (QUERIES, layer.num_heads, layout.keys.shape[2])
    query = torch.randn(shape, generator=generator).to(device, dtype)
    scales, softmax = kv_scales(layer), known.softmax()
    scale = layer.impl.scale * scales.key
    where = table[None], torch.zeros_like(positions), positions
    given = (query, pages, layout.keys, layout.values, *where, scale)
    more = {**softmax, "window": known.kind.window, "value_scale": scales.value}
    expected = torch.empty(*shape[:2], layout.values.shape[2], device=device)
    reference.sparse_attention(expected, query.float(), *given[1:], **more)
    for schedule in _schedules(known, query, where):
        found = torch.empty_like(expected, dtype=dtype)
        assert kernels.sparse_attention is not None
        kernels.sparse_attention(found, *given, **more, **schedule)
        yield "attention of the pass is not", found, expected
    if not known.kind.sees_all:
        return
    for highest in (False, True):
        asked = (positions, pages, layout.keys, table, CONTEXT, scale, highest)
        scores = reference.token_scores(query.float(), *asked, **softmax)
        yield "scores of tokens are not", kernels.token_scores(query, *asked, **softmax), scores


def _schedules(
    known: LayerKv, query: torch.Tensor, where: tuple[torch.Tensor, ...]
) -> Iterator[dict[str, Any]]:
    """Keys by one program, and by several, behind those that all queries of a tile see and with
    them, where the kernels plan that; else once."""
    plan = known.kernels.plan_attention
    if plan is None:
        yield {}
        return
    given = query, known.layout.keys, *where
    window = known.kind.window
    ways = [plan(*given, window=window, common_tiles=0)]
    if ways[0].common is not None:
        ways.append(plan(*given, window=window, common_tiles=QUERIES + 1))
    for planned in ways:
        for splits in (1, _SPLITS):
            yield {"schedule": replace(planned, splits=splits)}
