# SPDX-License-Identifier: Apache-2.0
"""What a codec stores of this model's pages is read back, and turned, within half a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_segreuse.kernels.codecs import LARGEST, Codec
from vllm_segreuse.kernels.pages import PageLayout, Rotation
from vllm_segreuse.model.cells import views
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.rope import DeltaRope
from vllm_segreuse.plan import Tier
from vllm_segreuse.prefill.align import Aligner, TokenCopies
from vllm_segreuse.prefill.mover import InPlace
from vllm_segreuse.prefill.proofs.scratch import Scratch

_SLACK = 1 + 2.0**-9
"""A scale is rounded up to float16, a code's product to float32: of the bound, less than this."""
_TINY = 2.0**-24
"""The smallest scale."""


def prove_codec(
    scratch: Scratch,
    aligner: Aligner,
    layouts: Sequence[PageLayout],
    ropes: Sequence[DeltaRope | None],
) -> None:
    """Encode the scratch tokens' blocks by the aligner's codec, and decode them one slot on, at
    every layer.

    A number may be off by half a step of its code, a turned one by that of its pair, both by the
    cache's own rounding.

    Raises:
        UnsupportedModelError: naming the layer and the error.
    """
    codec = aligner.codec
    if codec is Codec.RAW:
        return
    count = scratch.count - 1
    tokens = np.arange(count)
    moved = np.array([scratch.distance, 0, -7])[tokens // 50 % 3]
    _through_rows(scratch, aligner, tokens, moved)
    distances = torch.from_numpy(moved).to(aligner.device)
    for layer, layout, rope in zip(scratch.stack.attention, layouts, ropes, strict=True):
        pages = typed_pages(layer)
        for part, rotation, over in ((layout.keys, rope, 1), (layout.values, None, 3)):
            own = part.tokens(pages[scratch.own.tolist()]).float()
            found = part.tokens(pages[scratch.copy.tolist()])[1 : 1 + count].float()
            allowed = _half_steps(own, scratch.block_size, over, codec)[:count]
            wanted = own[:count]
            if rotation is not None:
                wanted = rotation.rotate(wanted, distances)
                allowed = _of_pairs(allowed, rotation.rotation)
            rounding = torch.finfo(pages.dtype).eps * (wanted.abs() + allowed)
            worst = float(((found - wanted).abs() / (allowed * _SLACK + rounding + _TINY)).max())
            if not worst <= 1:
                raise UnsupportedModelError(
                    f"{layer.layer_name}: keys or values that tier.codec {codec} has stored are "
                    f"not what they should be (off by {worst:.2g} times what rounding allows)"
                )


def _through_rows(
    scratch: Scratch, aligner: Aligner, tokens: np.ndarray, moved: np.ndarray
) -> None:
    """From the scratch tokens' blocks to rows, and from there to the copy's blocks, as plans do."""
    stored, device = aligner.stored_pages(), aligner.device
    shape = (len(scratch.own), sum(page.num_bytes for page in stored))
    cells = torch.zeros(shape, dtype=torch.int8, device=device)
    rows = np.arange(len(scratch.own))[::-1].copy()
    mover = InPlace(aligner.copy_blocks, views(cells, stored))
    encoded = mover.store(scratch.own, rows)
    if encoded is None or not bool(encoded.all()):
        raise UnsupportedModelError(f"tier.codec {aligner.codec} cannot store this model's KV")
    scratch.clear_copy()
    aligner.reading(mover).align(_copies(scratch, rows, tokens, moved))


def _copies(
    scratch: Scratch, rows: np.ndarray, tokens: np.ndarray, moved: np.ndarray
) -> TokenCopies:
    size = scratch.block_size
    source = rows[tokens // size] * size + tokens % size
    target = scratch.copy.astype(np.int64)[(tokens + 1) // size] * size + (tokens + 1) % size
    copies = TokenCopies.at_all_layers(source, target, moved)
    copies.tiers[:] = Tier.HOST
    return copies


def _half_steps(tokens: torch.Tensor, block_size: int, over: int, codec: Codec) -> torch.Tensor:
    """Half the distance of neighbouring codes around each number `[tokens, heads, channels]`.

    Args:
        over: what shares a scale: 1, the tokens of a block; 3, the channels of a token.
    """
    blocks = tokens.unflatten(0, (-1, block_size))
    scale = (blocks.abs().amax(over, keepdim=True) / LARGEST[codec]).clamp(min=_TINY)
    half = scale.expand_as(blocks) / 2
    if codec is Codec.FP8:
        half = (blocks.abs() / 16).maximum(scale / 1024)
    return half.flatten(0, 1)


def _of_pairs(allowed: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """What a turned number may be off by, from what the numbers of its pair may be."""
    first, last = rotation.first, rotation.first + rotation.dim
    turning = allowed[..., first:last]
    pairs = turning.unflatten(-1, (2, -1) if rotation.neox else (-1, 2))
    both = pairs.norm(dim=-2 if rotation.neox else -1, keepdim=True).expand_as(pairs)
    result = allowed.clone()
    result[..., first:last] = both.flatten(-2)
    return result
