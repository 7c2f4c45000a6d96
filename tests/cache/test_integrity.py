# SPDX-License-Identifier: Apache-2.0
"""The check that the tests and models rely on notices every kind of damage."""

from collections.abc import Callable

import numpy as np
import pytest

from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.links import MAX_VIEWS, RETURNED, UNUSED

SIZE = 2
Damage = Callable[[SegmentIndex], None]


def sound_index() -> SegmentIndex:
    """Blocks 0, 1, 2 in a row, 3 with the content of 0, 4 beside 1; 0 known in two namespaces.

    An entry was given back, so that there is one to be lost.
    """
    index = SegmentIndex(8, SIZE)
    tokens = np.array([1, 2, 3, 4, 5, 6], np.int32)
    index.insert(0, np.array([0, 1, 2], np.int32), tokens, 0)
    index.insert(0, np.array([3], np.int32), tokens[:2], 0)
    index.insert(0, np.array([4], np.int32), tokens[4:], 2, parent_block=0)
    index.insert(1, np.array([0], np.int32), tokens[:2], 0)
    index.insert(0, np.array([5], np.int32), tokens[2:4], 40)
    index.insert(2, np.array([5], np.int32), tokens[2:4], 40)
    index.remove(5)
    index.check_integrity()
    return index


def put(entry: int, field: str, value: int) -> Damage:
    def damage(index: SegmentIndex) -> None:
        assert index.nodes[entry][field] != value
        index.nodes[entry][field] = value

    return damage


def set_size(index: SegmentIndex) -> None:
    index._size += 1


def count_namespace(index: SegmentIndex) -> None:
    index._population[0] += 1


def count_nobody(index: SegmentIndex) -> None:
    index._population[7] += 1


def lose_entries(index: SegmentIndex) -> None:
    index.spares[RETURNED] = -1


def lose_new_entries(index: SegmentIndex) -> None:
    index.spares[UNUSED] += 1


def free_what_is_in_use(index: SegmentIndex) -> None:
    index.spares[RETURNED] = 8


def count_anchor(index: SegmentIndex) -> None:
    place = int(index.nodes[1]["anchor"]) & (index.anchor_counts.size - 1)
    index.anchor_counts[place] += 1


def lose_bucket(index: SegmentIndex) -> None:
    index.heads[int(index.nodes[1]["key"]) % index.heads.size] = -1


def change_tokens(index: SegmentIndex) -> None:
    index.tokens[3, 0] += 1


DAMAGES: dict[str, Damage] = {
    "the number of blocks": set_size,
    "the number of a namespace's blocks": count_namespace,
    "blocks of a namespace that has none": count_nobody,
    "entries are lost": lose_entries,
    "entries that were never used are lost": lose_new_entries,
    "a free entry is in use": free_what_is_in_use,
    "an anchor is counted once too often": count_anchor,
    "a bucket forgets its groups": lose_bucket,
    "twins of other content": change_tokens,
    "a block's views differ": put(0, "position", 6),
    "a view of another block": put(8, "block", 1),
    "views in a circle": put(8, "next_view", 0),
    "a block twice in a namespace": put(8, "namespace", 0),
    "a parent that is not in use": put(1, "parent", 6),
    "a parent that is not just before": put(2, "parent", 0),
    "a parent that does not know its child": put(0, "first_child", -1),
    "a child of somebody else": put(2, "parent", -1),
    "a sibling that is not": put(1, "previous_sibling", 2),
    "another namespace's parent": put(1, "parent", 8),
    "a group without a head": put(1, "is_head", 0),
    "a group with two heads": put(3, "is_head", 1),
    "a chain back to nowhere": put(1, "previous_group", 3),
    "a ring that is none": put(3, "previous_twin", 3),
    "an entry in the wrong bucket": put(1, "key", 12345),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_noticed(kind: str) -> None:
    index = sound_index()
    DAMAGES[kind](index)
    with pytest.raises(AssertionError):
        index.check_integrity()


def test_a_block_of_as_many_namespaces_as_may_be_is_sound() -> None:
    index = SegmentIndex(4, SIZE)
    tokens = np.array([1, 2], np.int32)
    for namespace in range(MAX_VIEWS):
        index.insert(namespace, np.array([0], np.int32), tokens, 0)
    index.check_integrity()
    assert index.population(MAX_VIEWS - 1) == 1
