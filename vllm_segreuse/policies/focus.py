# SPDX-License-Identifier: Apache-2.0
"""`focus`: recompute what the question looks up, with the layers that look things up. The default.

As in `prophet`, the last new tokens run through the model against the reused KV, and reused tokens
are chosen by the attention that they get. Five things differ, each of which lost less on
pretrained models (docs/quality.md):

- Only the second half of the layers counts. Earlier ones attend to what is near and to what begins
  a text, whatever is asked.
- What the last few queries pay counts as much as what all of them pay: the score is the geometric
  mean of both sums. The last ones begin to answer, and attend to what the answer is read from; the
  others attend to what the question is about.
- The budget grows with the number of segments more than with their length: each has something that
  the others of its prompt change, and what a question looks up grows less than what it looks it up
  in. Segments that were computed with little in front of them lack all of their context, and add
  more; segments behind nearly the text that they were computed behind, as after an edit of a
  conversation, lack little of it, and add less. All segments of a prompt share one budget.
  `recompute_ratio`, where it is set, is the share of all of them.
- Attention is compared with that of the token's segment, more than with all: which segments get how
  much of it says less about what they lack than what stands out within each.
- What recomputation changes of a token is carried to its neighbours (`prefill/carried.py`).
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.plan import FloatArray, Gather, IntArray, Probed, Recipe
from vllm_segreuse.policies.base import Situation
from vllm_segreuse.policies.prophet import by_the_question

FEW_TOKENS = 64
"""A segment that was computed behind fewer tokens was computed alone: what stands there is a chat
template, or a sentence at most."""

TOKENS = 70
"""Segments that were computed behind other text add so many together at least, even if there are
none."""

BEHIND, BEHIND_SHARE = 12, 0.04
"""Tokens that each of these adds, and the share of its own."""

ALONE, ALONE_SHARE = 13, 0.08
"""The same of each segment that was computed alone."""

AT_MOST = 1 / 3
"""The tokens that a segment adds, beside its share, are at most so many of its own."""

MUCH = 0.25
"""Share of what is in front of a segment's tokens, there and here, that is only on one side: with
as much and more it stands behind another text. Behind an edit it is less: the square root of its
part is added."""

LEVELLING = 0.75
"""Power of a segment's mean attention by which its tokens' is divided. As it is, a few segments may
get all of it, such as one that began another prompt, to whose beginning everything attends; of the
others nothing would then be recomputed that could be carried."""

FEWEST = 32
"""Fewer tokens are not worth reading the question twice, as a choice takes: they are moved only."""


def recipe(situation: Situation) -> Recipe:
    """`prophet`'s recipe, with another score and budget."""
    program = Probed(
        Gather.SUM_AND_LAST,
        first_layer=situation.num_layers // 2,
        levelling=LEVELLING,
        carries=True,
    )
    return by_the_question(situation, program, _budget(situation))


def _budget(situation: Situation) -> int:
    if situation.recompute_ratio is not None:
        return situation.budget()
    segments = situation.segments
    need = np.sqrt(np.minimum(1, segments.changed / MUCH))  # 0 for those in their own context
    lengths = situation.lengths
    is_alone = segments.position < FEW_TOKENS
    behind = _added(lengths, need * ~is_alone, BEHIND, BEHIND_SHARE)
    moved = max(1, int(lengths[need > 0].sum()))
    least = TOKENS * float(need @ lengths) / moved
    budget = round(max(least, behind) + _added(lengths, need * is_alone, ALONE, ALONE_SHARE))
    return budget if budget >= FEWEST else 0


def _added(lengths: IntArray, need: FloatArray, tokens: int, share: float) -> float:
    """What segments of these lengths add to the budget.

    Args:
        need: of each, the share that it adds of what it would add in another context.
    """
    return float(need @ np.minimum(tokens, AT_MOST * lengths)) + share * float(need @ lengths)
