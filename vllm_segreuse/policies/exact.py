# SPDX-License-Identifier: Apache-2.0
"""`exact`: compute what is not resident, and reuse only KV that is exact where it stands.

What it reuses is not found by content. The request's own prefix blocks are, by vLLM's chained hash,
also behind a hole in the prefix (`cache/exact.py`); they are copied unchanged, and the model's own
forward computes the holes. The result differs from full prefill no more than a prefix hit of vLLM
does.
"""

from __future__ import annotations

from vllm_segreuse.plan import Recipe, Stock
from vllm_segreuse.policies.base import Situation


def recipe(situation: Situation) -> Recipe:
    """Compute the holes, as vLLM would."""
    return Recipe.without_choice(~situation.reused, Stock())
