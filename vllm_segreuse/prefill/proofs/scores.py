# SPDX-License-Identifier: Apache-2.0
"""Scores of tokens are the attention that queries pay them."""

from __future__ import annotations

import torch

from vllm_segreuse.kernels import reference
from vllm_segreuse.model.kv_format import kv_scales
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.plan.programs import LAST_PROBES
from vllm_segreuse.prefill.proofs.scratch import Scratch, relative_error, tolerance


@torch.inference_mode()
def prove_scores(scratch: Scratch, layers: list[LayerKv]) -> None:
    """The kernel that scores tokens must agree with plain torch, at every layer that may be asked.

    Nothing else here would notice: whatever is chosen, the pass reproduces the KV.
    """
    device = scratch.stack.attention[0].kv_cache.device
    positions = torch.arange(scratch.count % 5, scratch.count, 5, device=device)
    generator = torch.Generator().manual_seed(0)
    for known in layers:
        if not known.kind.sees_all:
            continue
        layer = known.attention
        blocks = torch.from_numpy(scratch.own_in(known.table)).to(device)
        shape = (len(positions), layer.num_heads, layer.head_size)
        query = torch.randn(shape, generator=generator).to(device, scratch.dtype)
        keys, scale = known.layout.attended, layer.impl.scale * kv_scales(layer).key
        given = (query, positions, known.pages, keys, blocks, scratch.count, scale)
        softmax = known.softmax()
        for highest, last in ((False, None), (True, None), (False, LAST_PROBES)):
            expected = reference.token_scores(*given, highest, last=last, **softmax)
            found = known.kernels.token_scores(*given, highest, last=last, **softmax)
            error = relative_error(found, expected)
            if not error <= tolerance(scratch.dtype):
                raise UnsupportedModelError(
                    f"{layer.layer_name}: the scores of tokens are not the attention that "
                    f"queries pay them (off by {error:.2g} of their norm)"
                )
