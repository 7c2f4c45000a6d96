# SPDX-License-Identifier: Apache-2.0
"""`exact`: compute what is not resident, and reuse only KV that is exact where it stands.

What it reuses is not found by content. The request's own prefix blocks are, by vLLM's chained hash,
also behind a hole in the prefix (`cache/exact.py`); they are copied unchanged, and the model's own
forward computes the holes. The result differs from full prefill no more than a prefix hit of vLLM
does.
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.cache.plan import Recipe
from vllm_segreuse.policies.base import Situation


def recipe(situation: Situation) -> Recipe:
    """Compute the holes, as vLLM would."""
    new = ~situation.reused
    return Recipe(new, dense_layers=0, top_k=0, probes=np.zeros_like(new), stock=True)
