# SPDX-License-Identifier: Apache-2.0
"""Of states alone: what heads keep over a text, what maps take, how exact composing is."""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor

from lab.delta import Carried
from lab.hybrids.arms import in_pieces
from lab.hybrids.worlds import World
from lab.segments import Memory, Passed, Reader, Segment

SPANS = (64, 256, 1000)
"""Tokens over which it is asked what is kept."""
KEPT = 0.01
"""A head keeps something of a state while the largest singular value of `A` is above this."""


def heads_kept(reader: Reader, worlds: list[World]) -> dict[int, float]:
    """Share of heads that keep something over so many tokens of documents, mean over texts.

    Args:
        reader: of the model.
        worlds: their documents, one behind the other, are cut into texts of the longest span.
    """
    words = [token for world in worlds for one in world.documents for token in one]
    found: dict[int, list[float]] = {span: [] for span in SPANS}
    for first in range(0, len(words) - max(SPANS) + 1, max(SPANS)):
        memory = reader.read(worlds[0].head, reader.nothing()).memory
        maps, behind = None, first
        for span in SPANS:
            read = reader.read(words[behind : first + span], memory, kept=True)
            assert read.segment is not None
            of_piece = [one.map for one in read.segment.layers if isinstance(one, Passed)]
            maps = (
                of_piece
                if maps is None
                else [one.then(later) for one, later in zip(maps, of_piece, strict=True)]
            )
            norms = torch.stack([torch.linalg.matrix_norm(one.kept, ord=2) for one in maps])
            found[span].append(float((norms > KEPT).float().mean()))
            memory, behind = read.memory, first + span
    return {span: fmean(shares) for span, shares in found.items()}


def composing_error(reader: Reader, world: World, dtype: torch.dtype) -> float:
    """How far states composed of a prompt's own maps are from those of reading it: the norm of the
    difference over that of the state, the largest of all layers.

    Args:
        reader: of the model.
        world: whose prompt is read.
        dtype: in which maps are kept.
    """
    memory = composed = reader.read(world.head, reader.nothing()).memory
    for tokens in world.documents:
        pieces = in_pieces(reader, tokens, memory)
        for piece in pieces:
            composed = reader.put(piece.as_dtype(dtype), composed)
        memory = reader.read(tokens, memory).memory
    return max(
        float((theirs - mine).norm() / mine.norm())
        for mine, theirs in zip(_states(memory), _states(composed), strict=True)
    )


def _states(memory: Memory) -> list[Tensor]:
    return [layer.state for layer in memory.layers if isinstance(layer, Carried)]


def costs(reader: Reader, segment: Segment) -> dict[str, float]:
    """What a document takes and costs, beside its KV and the reading of a token.

    Returns:
        `maps_kib`, `kv_kib` (both float32), `maps_in_tokens` (tokens whose KV is as large) and
        `compose_in_tokens` (tokens whose reading multiplies as often as composing it does).
    """
    maps, kv = segment.numbers()
    shape = reader.model.shape
    multiplied = (
        sum(not layer.attends for layer in reader.model.layers)
        * shape.linear_num_value_heads
        * (1 if shape.fades else shape.linear_key_head_dim)
        * shape.linear_key_head_dim
        * shape.linear_value_head_dim
    )
    embedding = reader.model.embed_tokens.weight.numel()
    weights = sum(one.numel() for one in reader.model.parameters()) - embedding
    return {
        "maps_kib": maps * 4 / 1024,
        "kv_kib": kv * 4 / 1024,
        "maps_in_tokens": maps / (kv / segment.length),
        "compose_in_tokens": multiplied / weights,
    }
