# SPDX-License-Identifier: Apache-2.0
"""CacheBlend (arXiv 2405.16444): dense up to the boundary, compare keys and values there with the
reused ones."""

from __future__ import annotations

import torch

from vllm_segreuse.model.kv_format import kv_scales, typed_pages
from vllm_segreuse.plan import Deviation
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.layer_runner import LayerRunner
from vllm_segreuse.prefill.programs.base import Computed, ProofCase
from vllm_segreuse.prefill.selection import choose_tokens

PROGRAM = Deviation


def run(program: Deviation, layers: LayerRunner, batch: Batch) -> Chunks[Computed]:
    """Choose by the squared distance of keys and values."""
    boundary = program.dense_layers
    state = yield from layers.run(0, boundary, batch.tokens, None, batch)
    attention, layout = layers.stack.attention[boundary], layers.layouts[boundary]
    pages, scales = typed_pages(attention), kv_scales(attention)
    table = layers.known[boundary].table
    distance = torch.zeros(len(batch.tokens), device=pages.device)
    halves = ((layout.keys, scales.key), (layout.values, scales.value))
    for part, computed in layers.keys_and_values(boundary, batch.tokens, state, batch):
        for new, (strides, scale) in zip(computed, halves, strict=True):
            held = batch.held(pages, strides, part, table).float().mul_(scale)
            distance[part] += held.sub_(new.float()).square_().sum((1, 2))
    active = choose_tokens(batch, distance).beside(batch.always)
    tokens, state = batch.tokens.take(active), layers.keep(state, active.device)
    state = yield from layers.run(boundary, len(layers), tokens, state, batch)
    return active.device, state


def proof_cases(_: int) -> list[ProofCase]:
    """As the paper compares: at the second layer."""
    return [ProofCase(Deviation(dense_layers=1), top_k=9)]
