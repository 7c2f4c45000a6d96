# SPDX-License-Identifier: Apache-2.0
"""Which tokens' exact KV is missed most: to first order, by gradients (attribution patching, arXiv
2310.10348). It knows full prefill, which no server does.
"""

from __future__ import annotations

import torch
from torch.nn.functional import kl_div

from bench.reuse.decoder import KV
from bench.reuse.scene import Scene


def attributions(scene: Scene) -> torch.Tensor:
    """What the first token's divergence would lose if a token's moved KV went towards full
    prefill's: nats, float32 `[tokens]`; 0 outside of documents, below 0 where it would grow."""
    exact, moved = scene.asked.exact, scene.kv
    shares = torch.zeros(moved.keys.shape[2], requires_grad=True)
    inside = torch.zeros_like(shares)
    inside[: len(scene.is_document)] = scene.is_document.float()

    def towards(here: torch.Tensor, there: torch.Tensor) -> list[torch.Tensor]:
        # A tensor a layer: each is written to before the next one is read.
        part = (shares * inside)[:, None].to(here.dtype)
        return [one + part * (other - one) for one, other in zip(here, there, strict=True)]

    kv = KV(towards(moved.keys, exact.keys), towards(moved.values, exact.values))
    question = scene.question
    tokens = torch.tensor(scene.asked.tokens)[question]
    logits = scene.decoder.compute(kv, tokens, question)
    of_full = scene.asked.logits[:1].log_softmax(-1)
    kl_div(logits.log_softmax(-1), of_full, log_target=True, reduction="sum").backward()
    assert shares.grad is not None
    return -shares.grad[: len(scene.is_document)]
