# SPDX-License-Identifier: Apache-2.0
"""Requests that compress documents, as a knowledge base sends them, and that name these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bench.integrity import frozen_parts
from segreuse_extras.compressed.orders import AnchorOrder, CopyOrder, ScoreOrder
from tests.parts import parts_of
from vllm_segreuse.plan import FreezeOrder

if TYPE_CHECKING:
    from tests.stateful.world import World

Kind = Literal["full", "score", "copy", "anchors"]
KINDS: tuple[Kind, ...] = ("full", "full", "score", "copy", "copy", "anchors")

ORDERS = ("segreuse_score", "segreuse_copy", "segreuse_anchors")
"""Options of the server's own requests, of which one makes something of a document."""


def entry(key: str, document: int) -> str:
    """Name of a document of a namespace."""
    return f"{document:x}{key.encode().hex():0>31}"


def anchored(key: str, document: int) -> str:
    """Name of its anchors."""
    return f"{document + 8:x}{key.encode().hex():0>31}"


def kept(document: Sequence[int]) -> list[int]:
    """Of its tokens, every other one."""
    return list(document[::2])


def order(
    kind: Kind, key: str, number: int, document: list[int], part: int, size: int
) -> tuple[list[int], tuple[str, ...] | None, dict[str, Any]]:
    """Tokens, extra keys and options of a request.

    Args:
        part: of the anchors.
        size: tokens per block.
    """
    source = [2, *document]
    if kind == "full":
        return _filled(source, size), None, {}
    if kind == "score":
        scored = ScoreOrder(1, len(source), max(1, len(document) // 2))
        return [*source, *document, document[-1]], None, {"segreuse_score": scored.encode()}
    if kind == "copy":
        positions = [1 + place for place in range(0, len(document), 2)]
        frozen = FreezeOrder(entry(key, number), 0, 1, 0).encode()
        copied = CopyOrder(source, positions).encode()
        options = {"segreuse_freeze": frozen, "segreuse_copy": copied}
        return _filled(kept(document), size), (key,), options
    before, own = ([80, 81], [82, 83]) if part else ([], [80, 81])
    tokens = [2, *before, *document[:6], *own]
    name = anchored(key, number)
    frozen = FreezeOrder(name, part, 2, len(tokens) - 2).encode()
    anchors = AnchorOrder(name, len(before), len(own)).encode()
    return tokens, (key,), {"segreuse_freeze": frozen, "segreuse_anchors": anchors}


def _filled(tokens: list[int], size: int) -> list[int]:
    """Up to a whole number of blocks, and one token more."""
    return tokens + tokens[-1:] * (1 + -len(tokens) % size)


def check_entries(world: World) -> None:
    """Blocks of a compressed document that is frozen hold its tokens, one behind the other."""
    size, worker = world.worker.block_size, world.worker
    for name, parts in frozen_parts(world.frozen).items():
        for part in (part for part in parts if part.tokens is not None):
            assert part.tokens is not None
            offset = part.first % size
            table = np.asarray(part.block_ids)
            slots = (table[:, None] * size + np.arange(size)).reshape(-1)
            slots = slots[offset : offset + len(part.tokens)]
            assert worker.token[slots].tolist() == part.tokens.tolist(), f"{name}: other tokens"
            places = np.arange(part.first, part.first + len(part.tokens))
            assert worker.position[slots].tolist() == places.tolist(), f"{name}: other positions"


def check_idle(world: World) -> None:
    """No order is remembered."""
    remembered = parts_of(world.side).compression.remembered
    assert not remembered, f"orders to score, or choices, of requests that ended: {remembered}"
