# SPDX-License-Identifier: Apache-2.0
"""`trace`: follow the attention from the question to what it rests on, and recompute that.

What an answer rests on is not only what the question looks at. The statement it looks at may itself
have read another one, whose meaning this prompt changed; a single score by the question's own
queries misses that one. So the choice is made in rounds. The new tokens run through the model
against the reused KV, and the reused tokens that get most of their attention, summed over layers
and heads, are chosen; these are computed in turn, and their attention leads to the next; and so on
backwards. Last, all tokens chosen are computed together with the new ones, from the first layer to
the last: whatever one of them reads of another is as fresh as in a full prefill.

No layer is dense: the work is about twice that of the tokens chosen.
"""

from __future__ import annotations

from vllm_segreuse.cache.plan import Recipe, Score
from vllm_segreuse.policies.base import Situation

ROUNDS = 4


def recipe(situation: Situation) -> Recipe:
    """New tokens (or the tail, where all is reused) are the first probes."""
    probes = situation.probes
    top_k = min(situation.wanted, int((~probes).sum()))
    return Recipe(probes, 0, top_k, probes, score=Score.TRACE, rounds=ROUNDS)
