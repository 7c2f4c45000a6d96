# SPDX-License-Identifier: Apache-2.0
"""`cacheblend`: recompute the tokens whose keys and values deviate most (arXiv 2405.16444).

Every token is computed at the first layer. At the second, keys and values are computed for every
token and compared with the reused ones; the `recompute_ratio` of reused tokens that differ most
(squared distance, keys and values together) are computed from there on. The paper uses 10 to 18 %.

Two differences: the paper narrows its choice a little at each later layer, while its published
code, like this, chooses once; and that code attends to the chosen tokens' future where queries are
scattered, while the masks here are exact. `dense_layers`, if it is a number of layers above 1,
moves the comparison deeper. Overflow has no effect.
"""

from __future__ import annotations

from vllm_segreuse.plan import Deviation, Recipe
from vllm_segreuse.policies.base import Situation


def recipe(situation: Situation) -> Recipe:
    """One dense layer, then new tokens and those that deviate."""
    new = ~situation.reused
    dense = min(max(1, int(situation.dense_layers)), situation.num_layers - 1)
    return situation.choosing(Deviation(dense), new, new, situation.budget())
