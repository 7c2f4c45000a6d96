# SPDX-License-Identifier: Apache-2.0
"""Each layer attends to what its kind says, with the weights that it says: in the stock backend,
and in the kernels of the pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_segreuse.compat.attention_impl import absorbed_queries
from vllm_segreuse.kernels import page_tokens, reference
from vllm_segreuse.kernels.pages import TiledStrides
from vllm_segreuse.model import token_kv
from vllm_segreuse.model.attention_kind import AttentionKind
from vllm_segreuse.model.kv_format import kv_scales
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.modules import UnsupportedModelError
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
                found = token_kv.attend(layer.attention, case.query, case.key, case.value)
            _compare(layer, case, who, found.float(), _by_reference(layer, case))


class _Case(NamedTuple):
    """Queries of a layer: tokens to place them, `[tokens, heads, channels]` of each."""

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
    count = len(positions)
    key = torch.zeros(count, *token_kv.key_shape(attention))
    value = torch.zeros(count, *token_kv.value_shape(attention))
    for token, share in ((0, 2.0), (1, 1.8)):
        # Capped, these logits lie beside each other; as they are, the first one has all the weight.
        logit = share * layer.kind.soft_cap
        key[positions == token] = logit / (key.shape[-1] * attention.impl.scale)
        value[positions == token] = token + 1.0
    query = torch.ones(count, attention.num_heads, token_kv.query_channels(attention))
    if token_kv.is_latent(attention):
        query, key[:2], value[:2] = _of_latents(scratch, layer, query)
    device, nobody = layer.pages.device, torch.zeros_like(positions)
    slots = table[positions // size].long() * size + positions % size
    tokens = TokenTable(*(each.to(device) for each in (nobody, positions, nobody, slots)))
    given = (each.to(device, scratch.dtype) for each in (query, key, value))
    # Layers of other tables are not asked: theirs are as good as any.
    return _Case(tokens, table.repeat(scratch.num_tables, 1).to(device), *given)


def _of_latents(
    scratch: Scratch, layer: LayerKv, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random queries, and keys and values of two tokens with logits of about 1: latent vectors are
    keys, too, so this shows that queries are absorbed as the layer does it."""
    attention, generator = layer.attention, torch.Generator().manual_seed(0)
    query = torch.randn(like.shape, generator=generator)
    absorbed = absorbed_queries(attention, query.to(layer.pages.device, scratch.dtype))
    size = 1 / (attention.impl.scale * float(absorbed.float().norm(dim=-1).mean()))
    key, value = (
        torch.randn(2, *shape, generator=generator) * size
        for shape in (token_kv.key_shape(attention), token_kv.value_shape(attention))
    )
    return query, key, value


def _by_reference(layer: LayerKv, case: _Case) -> torch.Tensor:
    """float32 `[tokens, heads, channels]`, of keys and values as they were written: fp8 rounds."""
    attention, positions = layer.attention, case.tokens.positions
    scales = kv_scales(attention)
    seen = int(positions[-1]) + 1

    def written(part: TiledStrides, scale: float) -> torch.Tensor:
        heads, _, channels = part.shape
        found = torch.zeros(seen, heads, channels, device=positions.device)
        here = page_tokens.read_tokens(layer.pages, part, case.tokens.slots)
        found[positions] = here.float() * scale
        return found

    query = case.query
    if token_kv.is_latent(attention):
        query = absorbed_queries(attention, query)
    mixed = reference.attend(
        query,
        written(layer.layout.attended, scales.key),
        written(layer.layout.values, scales.value),
        positions,
        attention.impl.scale,
        window=layer.kind.window,
        chunk=layer.kind.chunk,
        **layer.softmax(),
    )
    return token_kv.output_of(attention, mixed.to(query.dtype)).float()


def _compare(
    layer: LayerKv, case: _Case, who: str, found: torch.Tensor, expected: torch.Tensor
) -> None:
    """Relative to a head's largest output, or to what one key of equal weight contributes, where
    that is more."""
    visible = case.tokens.positions + 1
    if layer.kind.chunk:
        visible = case.tokens.positions % layer.kind.chunk + 1
    if layer.kind.window:
        visible = visible.clamp(max=layer.kind.window)
    first = case.value[:1].repeat_interleave(expected.shape[1] // case.value.shape[1], dim=1)
    of_one_key = token_kv.output_of(layer.attention, first).float().abs().amax(-1)
    allowed = expected.abs().amax(-1).maximum(of_one_key / visible[:, None])
    error = float(((found - expected).abs().amax(-1) / allowed).max())
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
