# SPDX-License-Identifier: Apache-2.0
"""Copies of tokens are where and what they should be."""

from __future__ import annotations

import numpy as np
import torch

from vllm_segreuse.kernels.pages import PageLayout
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.rope import DeltaRope
from vllm_segreuse.prefill.align import Aligner, TokenCopies
from vllm_segreuse.prefill.proofs.scratch import Scratch, relative_error

_MOST = torch.finfo(torch.bfloat16).eps
"""In fp8, too: a few numbers may be rounded the other way, not all of them."""


def prove_moves(
    scratch: Scratch, aligner: Aligner, layouts: list[PageLayout], ropes: list[DeltaRope | None]
) -> None:
    """The kernel that moves tokens must do what the proven rotation says, at every layer.

    Moves the scratch tokens one slot on, so that the copy crosses pages.
    """
    size, count = scratch.block_size, scratch.count - 1
    tokens = np.arange(count)

    def slots(blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return blocks.astype(np.int64)[positions // size] * size + positions % size

    # Some stay, some move back: one call carries all kinds.
    moved = np.array([scratch.distance, 0, -7])[tokens // 50 % 3]
    scratch.clear_copy()
    for table in range(scratch.num_tables):
        source = slots(scratch.own_in(table), tokens)
        target = slots(scratch.copy_in(table), tokens + 1)
        aligner.align(TokenCopies.at_all_layers(source, target, moved), table=table)
    distances = torch.from_numpy(moved).to(scratch.stack.attention[0].kv_cache.device)
    layers = zip(scratch.stack.attention, layouts, ropes, scratch.tables, strict=True)
    for layer, layout, delta_rope, table in layers:
        pages, both = typed_pages(layer), (scratch.own_in(table), scratch.copy_in(table))
        for part, rotation in ((layout.keys, delta_rope), (layout.values, None)):
            before, after = (
                part.tokens(pages[blocks.tolist()])[first : first + count]
                for blocks, first in zip(both, (0, 1), strict=True)
            )
            expected = before if rotation is None else rotation.rotate(before, distances)
            error = relative_error(after, expected)
            if not error <= min(torch.finfo(before.dtype).eps, _MOST):
                raise UnsupportedModelError(
                    f"{layer.layer_name}: moved keys or values are not where and what they "
                    f"should be (off by {error:.2g} of their norm)"
                )
