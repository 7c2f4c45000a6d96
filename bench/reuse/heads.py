# SPDX-License-Identifier: Apache-2.0
"""Which heads of a model tell what has to be recomputed.

A head does if the tokens that it pays most attention to have much of the attribution
(`attribution.py`). It is measured once per model, on tuning examples, as retrieval heads are (arXiv
2404.15574).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.reuse.attribution import attributions
from bench.reuse.leads import Head, levelled_scores
from bench.reuse.scene import Scene


@dataclass(frozen=True)
class Told:
    """Of all attribution above 0, the part of those tokens that are chosen.

    Attributes:
        heads: where a head's attention chooses, float32 `[layers, heads]`.
        policy: where the policy does.
    """

    heads: torch.Tensor
    policy: float

    @classmethod
    def of(cls, scene: Scene, share: float) -> Told:
        """So large a share of the reused tokens is chosen."""
        above = attributions(scene).clamp(min=0)

        def part(scores: torch.Tensor | None) -> float:
            chosen = scene.best(levelled_scores(scene, scores), round(share * scene.num_reused))
            return float(above[chosen].sum() / above.sum())

        heads = scene.paid.prod(1).sqrt()
        parts = torch.tensor([part(one) for one in heads.flatten(0, 1)])
        return cls(parts.view(heads.shape[:2]), part(None))


def best(found: Sequence[Told], number: int) -> dict[Head, float]:
    """The heads that tell most on average, the first one most, and how much. The last layer is not
    asked, as a pass does not run it."""
    mean = torch.stack([one.heads for one in found]).mean(0)[:-1]
    ranked = mean.flatten().sort(descending=True, stable=True)
    heads = [divmod(one, mean.shape[1]) for one in ranked.indices[:number].tolist()]
    return dict(zip(heads, ranked.values.tolist(), strict=False))
