# SPDX-License-Identifier: Apache-2.0
"""Exact blocks of a request's own prefix, in the KV cache or in the second tier.

Both are found by vLLM's chained hash, which covers all tokens up to the end of a block, the LoRA
adapter, the cache salt and multimodal inputs. So whose request computed them does not matter, as
with vLLM's own prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from vllm_segreuse.plan import IntArray

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_segreuse.compat.block_pool import SegmentBlockPool


class OwnPrefix:
    """Of one request; see `Prompt.resident_blocks`.

    Args:
        request: whose hashes count.
        pool: whose blocks are preferred.
        entry_of: entry of an exact record in the segment index, by vLLM's name of its block; -1:
            there is none.
    """

    def __init__(
        self, request: Request, pool: SegmentBlockPool, entry_of: Callable[[bytes], int]
    ) -> None:
        self._request, self._pool, self._entry_of = request, pool, entry_of

    def __call__(self, first: int, last: int) -> IntArray:
        """Blocks `[first, last)`: int32 `[last - first]`, block or entry, -1 for a hole."""
        found = self._pool.resident_blocks(self._request, first, last)
        hashes, group = self._request.block_hashes, self._pool.group.index
        for i in np.flatnonzero(found < 0).tolist():
            if first + i < len(hashes):
                found[i] = self._entry_of(make_block_hash_with_group_id(hashes[first + i], group))
        return found
