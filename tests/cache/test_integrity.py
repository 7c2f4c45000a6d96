# SPDX-License-Identifier: Apache-2.0
"""The check that the tests and models rely on notices every kind of damage."""

from collections.abc import Callable

import numpy as np
import pytest

from bench.integrity import check_integrity
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
    index.remove([5])
    check_integrity(index)
    return index


def put(entry: int, field: str, value: int) -> Damage:
    def damage(index: SegmentIndex) -> None:
        assert index.nodes[entry][field] != value
        index.nodes[entry][field] = value

    return damage


def put_head(entry: int, is_head: int) -> Damage:
    """Anchors are counted by heads: their counts stay right."""

    def damage(index: SegmentIndex) -> None:
        put(entry, "is_head", is_head)(index)
        place = int(index.nodes[entry]["anchor"]) & (index.anchor_counts.size - 1)
        if is_head:
            index.anchor_counts[place] += 1
        else:
            index.anchor_counts[place] -= 1

    return damage


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


def change_bucket(index: SegmentIndex) -> None:
    """Keys are drawn anew by each process: a fixed one may belong to the same bucket."""
    index.nodes[1]["key"] ^= 1


def change_tokens(index: SegmentIndex) -> None:
    index.tokens[3, 0] += 1


def hide(index: SegmentIndex) -> None:
    index._shown.pop(1)


def forget(index: SegmentIndex) -> None:
    index.known.forget(1)


def split_group(index: SegmentIndex) -> None:
    """Block 3 leaves its twin, in every link and count, for a group of its own."""
    nodes = index.nodes
    bucket = int(nodes[3]["key"]) % index.heads.size
    nodes[0]["next_twin"] = nodes[0]["previous_twin"] = 0
    nodes[3]["next_twin"] = nodes[3]["previous_twin"] = 3
    nodes[3]["is_head"], nodes[3]["previous_group"] = 1, -1
    nodes[3]["next_group"] = index.heads[bucket]
    nodes[index.heads[bucket]]["previous_group"] = 3
    index.heads[bucket] = 3
    index.anchor_counts[int(nodes[3]["anchor"]) & (index.anchor_counts.size - 1)] += 1


DAMAGES: dict[str, Damage] = {
    r"4 blocks, but len\(\) is 5": put(4, "born", 0),
    "population of namespace 0": put(3, "namespace", 5),
    "population of a namespace without entries": count_nobody,
    "1 entries are lost": lose_entries,
    "entries are lost": lose_new_entries,
    "entry 8 is free and in use": free_what_is_in_use,
    "anchor counts are wrong": count_anchor,
    "the buckets do not hold every entry": lose_bucket,
    "entry 3 is no twin of 0": change_tokens,
    "two groups with the content of entry": split_group,
    "namespace 1 has views that nobody drops": hide,
    r"namespace 1 has views of \{0\}, unknown to it": forget,
    "the views of block 0 disagree": put(8, "depth", 3),
    "a view of block 0 stands for another block": put(8, "block", 1),
    "0 is no view of block 0|run in circles": put(8, "next_view", 8),
    "block 0 twice in one": put(8, "namespace", 0),
    "its parent 6 is not in use": put(3, "parent", 6),
    "entry 2 is 4 tokens behind its parent": put(2, "position", 6),
    "entry 2 is 0 tokens behind its parent": put(2, "position", 2),
    "is not among the children of 0": put(0, "first_child", -1),
    "2 is no child of 1": put(2, "parent", -1),
    "siblings of 1|is not among the children": put(1, "previous_sibling", 2),
    "entry 3: foreign parent": put(3, "parent", 8),
    "in a chain, but no head": put_head(1, 0),
    "group with two heads": put_head(3, 1),
    "chain at entry 1": put(1, "previous_group", 3),
    "ring at": put(3, "previous_twin", 3),
    "bucket of 1|is in the wrong group": change_bucket,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damage_is_noticed(message: str) -> None:
    index = sound_index()
    DAMAGES[message](index)
    with pytest.raises(AssertionError, match=message):
        check_integrity(index)


def test_a_block_of_as_many_namespaces_as_may_be_is_sound() -> None:
    index = SegmentIndex(4, SIZE)
    tokens = np.array([1, 2], np.int32)
    for namespace in range(MAX_VIEWS):
        index.insert(namespace, np.array([0], np.int32), tokens, 0)
    check_integrity(index)
    assert index.population(MAX_VIEWS - 1) == 1
