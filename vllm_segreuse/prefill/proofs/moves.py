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
    source, target = slots(scratch.own, tokens), slots(scratch.copy, tokens + 1)
    scratch.clear_copy()
    aligner.align(TokenCopies.at_all_layers(source, target, moved))
    distances = torch.from_numpy(moved).to(scratch.stack.attention[0].kv_cache.device)
    for layer, layout, delta_rope in zip(scratch.stack.attention, layouts, ropes, strict=True):
        pages = typed_pages(layer)
        for part, rotation in ((layout.keys, delta_rope), (layout.values, None)):
            before, after = (
                part.tokens(pages[blocks.tolist()])[first : first + count]
                for blocks, first in ((scratch.own, 0), (scratch.copy, 1))
            )
            expected = before if rotation is None else rotation.rotate(before, distances)
            error = relative_error(after, expected)
            if not error <= min(torch.finfo(before.dtype).eps, _MOST):
                raise UnsupportedModelError(
                    f"{layer.layer_name}: moved keys or values are not where and what they "
                    f"should be (off by {error:.2g} of their norm)"
                )
