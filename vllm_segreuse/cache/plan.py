# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers about one request: where its reused KV comes from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recipe:
    """Which tokens of `[start, stop)` a policy computes, and at which layers.

    Attributes:
        always: bool `[stop - start]`: computed at every layer. Contains every token not reused.
        dense_layers: leading layers at which every token is computed (SparseX's l*).
        top_k: reused tokens outside `always` that are recomputed from layer `dense_layers` on,
            chosen by their score once the scores are known.
        probes: bool `[stop - start]`: tokens whose queries give the scores.
    """

    always: BoolArray
    dense_layers: int
    top_k: int
    probes: BoolArray


@dataclass
class ReusePlan:
    """The work of one request: positions `[start, stop)` are supplied by the connector.

    Attributes:
        token_ids: int32 `[stop - start]`.
        pieces: int32 `[pieces, 5]`: destination position, length, donor block, offset in the donor
            block, donor position (see `matcher.Matches`).
        recipe: what is computed.
        donor_blocks: distinct physical blocks the pieces read.
        donor_depth: largest provenance depth among them.
        block_ids: int32, the request's block table; known once vLLM has allocated it.
    """

    request_id: str
    start: int
    stop: int
    token_ids: IntArray
    pieces: IntArray
    recipe: Recipe
    donor_blocks: list[int]
    donor_depth: int
    block_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def num_tokens(self) -> int:
        """Tokens the connector supplies."""
        return self.stop - self.start

    @property
    def reused(self) -> BoolArray:
        """bool `[stop - start]`: tokens whose KV is copied."""
        return reused_mask(self.pieces, self.start, self.stop)

    @property
    def num_reused(self) -> int:
        """Tokens whose KV is copied."""
        return int(self.pieces[:, 1].sum())

    @property
    def num_recomputed(self) -> int:
        """Reused tokens that are computed again, at every layer from `dense_layers` on."""
        return (
            int(self.recipe.always.sum()) - (self.num_tokens - self.num_reused) + self.recipe.top_k
        )

    def in_full(self) -> ReusePlan:
        """The same tokens, all of them computed at every layer."""
        all_tokens = np.ones(self.num_tokens, dtype=np.bool_)
        none = np.zeros_like(all_tokens)
        return replace(self, recipe=Recipe(all_tokens, dense_layers=0, top_k=0, probes=none))

    @property
    def active_tokens(self) -> int:
        """Most tokens any layer of the pass computes."""
        if self.recipe.dense_layers:
            return self.num_tokens
        return int(self.recipe.always.sum()) + self.recipe.top_k


def reused_mask(pieces: IntArray, start: int, stop: int) -> BoolArray:
    """bool `[stop - start]`: positions covered by the pieces."""
    mask = np.zeros(stop - start + 1, dtype=np.int8)
    np.add.at(mask, pieces[:, 0] - start, 1)
    np.add.at(mask, pieces[:, 0] + pieces[:, 1] - start, -1)
    return np.cumsum(mask[:-1], dtype=np.int8).astype(np.bool_)
