# SPDX-License-Identifier: Apache-2.0
"""`prophet`: recompute what the question attends to (after ProphetKV, arXiv 2602.02579).

Two stages. First the new tokens alone run through the model against the reused KV, and the
attention they pay to each reused token is summed over all layers. Then the tokens that got most,
`recompute_ratio` of the reused ones, are computed together with the new ones.

ProphetKV's queries are those of the user's question; here they are those of the last interval of
new tokens. Overflow and dense layers are not part of the method, and these options have no effect.
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.plan import Recipe, Score
from vllm_segreuse.policies.base import Situation


def recipe(situation: Situation) -> Recipe:
    """One round of scores by the last new tokens."""
    new = ~situation.reused
    probes = np.zeros_like(new)
    if new.any():
        last = int(np.flatnonzero(new)[-1])
        before = np.flatnonzero(situation.reused[:last])
        probes[(int(before[-1]) + 1 if len(before) else 0) : last + 1] = True
    top_k = situation.wanted if new.any() else 0
    return Recipe(new, 0, top_k, probes, score=Score.TRACE)
