# SPDX-License-Identifier: Apache-2.0
"""`focus`: recompute what the question's attention is focused on, as many tokens as it takes.

As in `prophet`, the last new tokens run through the model against the reused KV, and the attention
that each reused token gets from them, summed over layers and heads, is its score. How many tokens
matter differs from question to question: one that looks a value up rests on a handful, one that
counts rests on hundreds. A fixed share is too much for the first, and too little for the second. So
the number is read off the scores: every token is recomputed whose score is at least `LEAST_SHARE`
of the peak, but at most `recompute_ratio` of the reused ones. A ratio of 1 recomputes all of them.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_segreuse.cache.plan import Recipe
from vllm_segreuse.policies import prophet
from vllm_segreuse.policies.base import Situation

LEAST_SHARE = 0.5


def recipe(situation: Situation) -> Recipe:
    """`prophet`'s recipe, with its number as the most."""
    least_share = 0.0 if situation.recompute_ratio == 1 else LEAST_SHARE
    return replace(prophet.recipe(situation), least_share=least_share)
