# SPDX-License-Identifier: Apache-2.0
"""`sparsex`: recompute the reused tokens that the new tokens attend to most (arXiv 2606.01751).

The recomputed set is the union of the paper's algorithm 1, lines 14 to 17:
- the top-k reused tokens by the attention they get from the new tokens' queries at the boundary
  layer, summed over queries and heads (equations 1 to 3);
- overflow: the reused tokens next to every interval of new tokens, on both sides (section 3.3);
- the last 64 tokens, when the prompt's tail is all reused and so has no query of its own (section
3.2).

With dense layers (section 3.4, "hybrid") every token is computed up to the boundary layer l*, whose
queries and keys then give the scores. Without, the new tokens' queries of the first layer score the
aligned keys of that layer, which are exact there: they depend on nothing but the token. With all
layers dense everything is computed, and there is nothing to choose.

One difference from the paper: top-k counts tokens beyond overflow and tail, not the union, so that
`recompute_ratio` = 1 recomputes everything and the counts in the report are known in advance.
"""

from __future__ import annotations

import numpy as np

from vllm_segreuse.plan import BoolArray, Boundary, Recipe
from vllm_segreuse.policies.base import Situation


def recipe(situation: Situation) -> Recipe:
    """New tokens, their surroundings and the tail always; top-k by score from the boundary on."""
    overflow = situation.overflow_tokens
    around = situation.block_size if overflow is None else overflow
    probes = situation.probes
    always = _widen(~situation.reused, around) | probes
    dense_layers = situation.num_dense_layers
    if max(dense_layers, 1) == situation.num_layers:
        # Of the last layer a pass computes keys and values only: no query there could choose.
        always[:] = True
    return situation.choosing(Boundary(dense_layers), always, probes, situation.budget())


def _widen(mask: BoolArray, by: int) -> BoolArray:
    """Every position within `by` of a set position."""
    edges = np.zeros(len(mask) + 1, dtype=np.int32)
    where = np.flatnonzero(mask)
    np.add.at(edges, np.maximum(where - by, 0), 1)
    np.add.at(edges, np.minimum(where + by + 1, len(mask)), -1)
    return np.asarray(np.cumsum(edges[:-1]) > 0)
