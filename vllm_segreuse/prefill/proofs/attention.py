# SPDX-License-Identifier: Apache-2.0
"""Each layer attends to what its kind says, with the weights that it says: in the stock backend,
and in the kernels of the pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_segreuse.kernels import page_tokens, reference
from vllm_segreuse.model.attention_kind import AttentionKind
from vllm_segreuse.model.kv_format import kv_scales
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.layers import UnsupportedModelError
from vllm_segreuse.prefill.attention import PassAttention
from vllm_segreuse.prefill.proofs.scratch import Scratch, tolerance
from vllm_segreuse.prefill.rows import RowBuilder
from vllm_segreuse.prefill.tokens import TokenTable


@torch.inference_mode()
def prove_attention(
    scratch: Scratch, layers: list[LayerKv], rows: RowBuilder, attention: PassAttention
) -> None:
    """Queries on both sides of every edge of a window must attend as `kernels/reference.py` does.

    The first two tokens have values, all others are zero. A window that is one key too wide, a sink
    that is dropped or logits that are not capped then change an output by its own size, however
    long the window is: random tokens would hide them in the rounding. As all other pages are equal,
    one page stands for them, and a window may be longer than the scratch blocks.
    """
    for layer in layers:
        case = _case(scratch, layer)
        for who, context in (
            ("the stock backend", rows.forward_context),
            ("the pass", attention.forward_context),
        ):
            layer.pages[scratch.copy.tolist()] = 0
            with context(case.tokens, case.block_table):
                found = layer.attention(case.query, case.key, case.value)
            expected = _by_reference(layer, case)
            _compare(layer, case, who, found.view_as(expected).float(), expected)


class _Case(NamedTuple):
    """Queries of a layer: tokens to place them, `[tokens, heads * head_size]` of each."""

    tokens: TokenTable
    block_table: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def _case(scratch: Scratch, layer: LayerKv) -> _Case:
    """The first two tokens, and queries at every edge of the window."""
    attention, size = layer.attention, scratch.block_size
    edge = layer.kind.window or layer.kind.chunk or 2 * size
    wanted = {0, 1, edge // 2, edge - 1, edge, edge + 1}
    positions = torch.tensor(sorted(p for p in wanted if p < scratch.max_model_len))
    first, others = scratch.copy[:2].tolist()
    table = torch.full((int(positions[-1]) // size + 1,), others, dtype=torch.int32)
    table[0] = first
    shape = (len(positions), attention.num_kv_heads, attention.head_size)
    key, value = torch.zeros(shape), torch.zeros(shape)
    for token, share in ((0, 2.0), (1, 1.8)):
        # Capped, these logits lie beside each other; as they are, the first one has all the weight.
        logit = share * layer.kind.soft_cap
        key[positions == token] = logit / (attention.head_size * attention.impl.scale)
        value[positions == token] = token + 1.0
    query = torch.ones(len(positions), attention.num_heads, attention.head_size)
    device, nobody = layer.pages.device, torch.zeros_like(positions)
    slots = table[positions // size].long() * size + positions % size
    tokens = TokenTable(*(each.to(device) for each in (nobody, positions, nobody, slots)))
    flat = (each.flatten(1).to(device, scratch.dtype) for each in (query, key, value))
    return _Case(tokens, table[None].to(device), *flat)


def _by_reference(layer: LayerKv, case: _Case) -> torch.Tensor:
    """float32 `[tokens, heads, head_size]`, of keys and values as they were written: fp8 rounds."""
    attention, positions = layer.attention, case.tokens.positions
    scales = kv_scales(attention)
    seen = (int(positions[-1]) + 1, attention.num_kv_heads, attention.head_size)
    key, value = (torch.zeros(seen, device=positions.device) for _ in range(2))
    for into, part, scale in (
        (key, layer.layout.keys, scales.key),
        (value, layer.layout.values, scales.value),
    ):
        into[positions] = (
            page_tokens.read_tokens(layer.pages, part, case.tokens.slots).float() * scale
        )
    return reference.attend(
        case.query.view(len(positions), -1, attention.head_size),
        key,
        value,
        positions,
        attention.impl.scale,
        window=layer.kind.window,
        chunk=layer.kind.chunk,
        **layer.softmax(),
    )


def _compare(
    layer: LayerKv, case: _Case, who: str, found: torch.Tensor, expected: torch.Tensor
) -> None:
    """Relative to what one key of equal weight contributes, where an output is smaller."""
    visible = case.tokens.positions + 1
    if layer.kind.chunk:
        visible = case.tokens.positions % layer.kind.chunk + 1
    if layer.kind.window:
        visible = visible.clamp(max=layer.kind.window)
    least = (1 / visible.float())[:, None, None]
    error = float(((found - expected).abs() / expected.abs().maximum(least)).max())
    if not error <= tolerance(case.query.dtype):
        raise UnsupportedModelError(
            f"{layer.attention.layer_name}: {who} does not attend to {_described(layer.kind)} "
            f"(off by {error:.2g})"
        )


def _described(kind: AttentionKind) -> str:
    keys = f"the last {kind.window} tokens" if kind.window else "all tokens before"
    if kind.chunk:
        keys += f" in their chunk of {kind.chunk}"
    sinks = ", with sinks" if kind.has_sinks else ""
    cap = f", with logits capped at {kind.soft_cap:g}" if kind.soft_cap else ""
    return keys + sinks + cap
