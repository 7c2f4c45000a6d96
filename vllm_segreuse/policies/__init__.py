# SPDX-License-Identifier: Apache-2.0
"""Policies: which reused tokens are computed again. One small file each; add yours to `POLICIES`.

A policy runs in the scheduler process and is free of torch: it turns what is known about a request
(which tokens are reused, the options) into a `Recipe`, which the workers carry out.
"""

from __future__ import annotations

from vllm_segreuse.policies import cacheblend, epic, exact, focus, prophet, shift, sparsex
from vllm_segreuse.policies.base import Policy, Situation

POLICIES: dict[str, Policy] = {
    "shift": shift.recipe,
    "epic": epic.recipe,
    "cacheblend": cacheblend.recipe,
    "sparsex": sparsex.recipe,
    "prophet": prophet.recipe,
    "focus": focus.recipe,
    "exact": exact.recipe,
}

__all__ = ["POLICIES", "Policy", "Situation"]
