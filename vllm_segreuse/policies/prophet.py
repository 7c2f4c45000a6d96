# SPDX-License-Identifier: Apache-2.0
"""`prophet`: recompute what the question attends to (after ProphetKV, arXiv 2602.02579).

Two stages. First the question alone runs through the model against the reused KV, and the attention
it pays to each reused token is summed over all layers. Then the tokens that got most,
`recompute_ratio` of the reused ones, are computed together with the new ones.

ProphetKV is told which tokens are the user's question; here they are the end of the last interval
of new tokens. Overflow and dense layers are not part of the method, and have no effect.
"""

from __future__ import annotations

from vllm_segreuse.plan import Gather, Probed, Recipe
from vllm_segreuse.policies.base import Situation


def recipe(situation: Situation) -> Recipe:
    """New tokens, the question among them, and the top-k by its attention."""
    return by_the_question(situation, Probed(Gather.SUM), situation.budget())


def by_the_question(situation: Situation, program: Probed, budget: int) -> Recipe:
    """The recipe of a policy that goes by the question's attention.

    Args:
        situation: what is reused.
        program: how that attention becomes scores.
        budget: most reused tokens to recompute.
    """
    question = situation.question
    return situation.choosing(program, ~situation.reused | question, question, budget)
