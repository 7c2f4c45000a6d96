# SPDX-License-Identifier: Apache-2.0
"""`shift`: re-rotate the reused keys and compute nothing of them again.

The literature's "naive reuse": the fastest, and blind to what the new context changes.
"""

from __future__ import annotations

from vllm_segreuse.plan import Recipe
from vllm_segreuse.policies.base import Situation

CHOOSES = False


def recipe(situation: Situation) -> Recipe:
    """Compute the new tokens only."""
    return Recipe.without_choice(~situation.reused)
