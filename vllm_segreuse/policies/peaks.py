# SPDX-License-Identifier: Apache-2.0
"""`peaks`: recompute what any one head of any one new token looks at, as many tokens as there are.

It was the default while the small models of `models/` were all that it was chosen on. On pretrained
models `focus` loses less.

As in `prophet`, the last new tokens run through the model against the reused KV. But where it sums
the attention that a reused token gets, here the peak counts: the largest share of its attention
that any of these queries pays it, with any head at any layer. A head that looks something up rests
on a token or two. In a sum these drown in what many heads pay, a little each, to tokens that matter
to none of them, and the more so the more is asked at once.

A peak is a share of one head's attention, so it means the same for every model and length: every
token is recomputed that gets at least `LEAST_SHARE` once, but at most `recompute_ratio` of the
reused ones, the highest first. How many that are differs from question to question. A ratio of 1
recomputes all of them.
"""

from __future__ import annotations

from vllm_segreuse.plan import Gather, Probed, Recipe
from vllm_segreuse.policies.base import Situation
from vllm_segreuse.policies.prophet import by_the_question

LEAST_SHARE = 0.05


def recipe(situation: Situation) -> Recipe:
    """`prophet`'s recipe, with its number as the most."""
    threshold = 0.0 if situation.ratio() == 1 else LEAST_SHARE
    return by_the_question(situation, Probed(Gather.MAX, threshold), situation.budget())
