# SPDX-License-Identifier: Apache-2.0
"""Exact blocks of a request's own prefix, of which the second tier may have those that are gone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from vllm_segreuse.features.tier.own_prefix import OwnPrefix

GROUP = 3
HASHES: list[Any] = [b"first", b"second", b"third", b"fourth"]
ENTRIES = {make_block_hash_with_group_id(HASHES[i], GROUP): 100 + i for i in (0, 1, 3)}


class Pool:
    """Holds blocks of the request, by their numbers in the prompt."""

    group = SimpleNamespace(index=GROUP)

    def __init__(self, held: dict[int, int]) -> None:
        self._held = held

    def resident_blocks(self, request: Any, first: int, last: int) -> np.ndarray:
        assert request.block_hashes is HASHES
        return np.array([self._held.get(i, -1) for i in range(first, last)], np.int32)


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [
        (0, 4, [100, 7, -1, 103]),
        (1, 4, [7, -1, 103]),
        (3, 4, [103]),
        (0, 1, [100]),
        (2, 6, [-1, 103, -1, -1]),
        (4, 5, [-1]),
        (2, 2, []),
    ],
)
def test_blocks_of_gpu_memory_come_first_and_the_tier_fills_holes(
    first: int, last: int, found: list[int]
) -> None:
    request: Any = SimpleNamespace(block_hashes=HASHES)
    pool: Any = Pool({1: 7})
    blocks = OwnPrefix(request, pool, lambda name: ENTRIES.get(name, -1))(first, last)
    assert blocks.tolist() == found
    assert blocks.dtype == np.int32


def test_a_block_whose_number_is_0_is_no_hole() -> None:
    request: Any = SimpleNamespace(block_hashes=HASHES)
    pool: Any = Pool({0: 0, 1: 1})
    own = OwnPrefix(request, pool, lambda name: ENTRIES.get(name, -1))
    assert own(0, 2).tolist() == [0, 1]
