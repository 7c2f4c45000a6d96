# SPDX-License-Identifier: Apache-2.0
"""`focus`: recompute what the question looks up, with the layers that look things up. The default.

As in `prophet`, the last new tokens run through the model against the reused KV, and reused tokens
are chosen by the attention that they get. Three things differ, each of which lost less on
pretrained models (docs/quality.md):

- Only the second half of the layers counts. Earlier ones attend to what is near and to what begins
  a text, whatever is asked.
- What the last few queries pay counts as much as what all of them pay: the score is the geometric
  mean of both sums. The last ones begin to answer, and attend to what the answer is read from; the
  others attend to what the question is about.
- The budget is a number of tokens and a share, since what a question looks up grows less than the
  prompt does; and a number for each segment that was computed with little in front of it, since
  each of these lacks its context. All segments of a prompt share one budget. `recompute_ratio`,
  where it is set, is the share of all of them.
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.plan import Gather, Probed, Recipe
from vllm_segreuse.policies.base import Situation
from vllm_segreuse.policies.prophet import by_the_question

FEW_TOKENS = 64
"""A segment that was computed behind fewer tokens was computed alone: what stands there is a chat
template, or a sentence at most."""

TOKENS, SHARE = 105, 0.12
"""Tokens, and a share of the reused ones, that are recomputed."""

ALONE, ALONE_AT_MOST = 20, 1 / 3
"""Tokens for each segment that was computed alone, in addition; and the share of its own that these
are at most."""


def recipe(situation: Situation) -> Recipe:
    """`prophet`'s recipe, with another score and budget."""
    program = Probed(Gather.SUM_AND_LAST, first_layer=situation.num_layers // 2)
    return by_the_question(situation, program, _budget(situation))


def _budget(situation: Situation) -> int:
    if situation.recompute_ratio is not None:
        return situation.budget()
    of_other_context = ~situation.segments.in_context
    lengths = situation.lengths[of_other_context]
    alone = lengths[situation.segments.position[of_other_context] < FEW_TOKENS]
    in_addition = float(np.minimum(ALONE, ALONE_AT_MOST * alone).sum())
    return round(TOKENS + SHARE * int(lengths.sum()) + in_addition)
