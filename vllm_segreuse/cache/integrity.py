# SPDX-License-Identifier: Apache-2.0
"""Whether the segment index is consistent: every link both ways, every count recounted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_segreuse.cache.links import FULL, RETURNED, UNUSED

if TYPE_CHECKING:
    from vllm_segreuse.cache.index import SegmentIndex

_SHARED = ["born", "position", "depth", "anchor", "block"]


def check(index: SegmentIndex) -> None:
    """AssertionError with what is wrong. O(blocks), for tests."""
    entries = np.flatnonzero(index.nodes["born"])
    blocks = entries[entries < index.num_blocks]
    assert len(blocks) == len(index), f"{len(blocks)} blocks, but len() is {len(index)}"
    views = [entry for block in blocks.tolist() for entry in _check_views(index, block)]
    assert sorted(views) == entries.tolist(), "an entry belongs to no block, or to two"
    _check_spares(index, len(entries) - len(blocks))
    namespaces = index.nodes["namespace"][blocks]
    for namespace, count in zip(*np.unique(namespaces, return_counts=True), strict=True):
        assert index._population[namespace] == count, f"population of namespace {namespace}"
    assert index._population.sum() == len(blocks), "population of a namespace without entries"
    _check_known(index)
    for entry in entries.tolist():
        _check_family(index, entry)
    _check_anchors(index, entries[index.nodes["is_head"][entries] != 0])
    seen = [entry for bucket in range(index.heads.size) for entry in _check_bucket(index, bucket)]
    assert sorted(seen) == entries.tolist(), "the buckets do not hold every entry exactly once"


def _check_views(index: SegmentIndex, block: int) -> list[int]:
    views: list[int] = []
    entry = block
    while entry >= 0:
        assert entry == block or entry >= index.num_blocks, f"{entry} is no view of block {block}"
        assert entry not in views, f"the views of block {block} run in circles"
        views.append(entry)
        entry = int(index.nodes[entry]["next_view"])
    assert len(views) <= index.max_views + 1, f"block {block} has {len(views)} views"
    nodes = index.nodes[views]
    assert len(set(nodes["namespace"].tolist())) == len(views), f"block {block} twice in one"
    assert (nodes["block"] == block).all(), f"a view of block {block} stands for another block"
    assert (nodes[_SHARED] == nodes[_SHARED][0]).all(), f"the views of block {block} disagree"
    return views


def _check_known(index: SegmentIndex) -> None:
    """Namespaces have views of what they know of others, if they have any."""
    index.known.check_integrity()
    views = index.nodes[index.num_blocks :]
    views = views[views["born"] != 0]
    for namespace in {*np.unique(views["namespace"]).tolist(), *index._shown}:
        assert namespace in index._shown, f"namespace {namespace} has views that nobody drops"
        known = index.known.table(namespace)[:, 0]
        known = known[known >= 0]
        assert index.nodes["born"][known].all(), f"namespace {namespace} knows what is gone"
        others = known[index.nodes["namespace"][known] != namespace]
        mine = views["block"][views["namespace"] == namespace]
        is_current = index._shown[namespace] == index.known.changes
        missing = {*others.tolist()} - {*mine.tolist()}
        assert not (missing and is_current), f"namespace {namespace} has no views of {missing}"
        foreign = {*mine.tolist()} - {*others.tolist()}
        assert not foreign, f"namespace {namespace} has views of {foreign}, unknown to it"


def _check_spares(index: SegmentIndex, in_use: int) -> None:
    free: list[int] = []
    entry = int(index.spares[RETURNED])
    while entry >= 0:
        assert entry not in free, f"the free entries run in circles at {entry}"
        assert not index.nodes[entry]["born"], f"entry {entry} is free and in use"
        free.append(entry)
        entry = int(index.nodes[entry]["next_view"])
    taken = int(index.spares[UNUSED]) - index.num_blocks
    assert taken == in_use + len(free), f"{taken - in_use - len(free)} entries are lost"


def _check_anchors(index: SegmentIndex, heads: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    places = index.nodes["anchor"][heads] & np.uint32(index.anchor_counts.size - 1)
    exact = np.bincount(places, minlength=index.anchor_counts.size)
    wrong = (index.anchor_counts != exact) & (index.anchor_counts < FULL)
    assert not wrong.any(), f"anchor counts are wrong at {np.flatnonzero(wrong)}"


def _check_family(index: SegmentIndex, entry: int) -> None:
    nodes, node = index.nodes, index.nodes[entry]
    parent, previous = node["parent"], -1
    if parent >= 0:
        above = nodes[parent]
        assert above["born"], f"entry {entry}: its parent {parent} is not in use"
        assert above["namespace"] == node["namespace"], f"entry {entry}: foreign parent"
        gap = node["position"] - above["position"]
        assert gap == index.block_size, f"entry {entry} is {gap} tokens behind its parent"
        older = node["previous_sibling"]
        linked = nodes[older]["next_sibling"] if older >= 0 else above["first_child"]
        assert linked == entry, f"entry {entry} is not among the children of {parent}"
    child = node["first_child"]
    while child >= 0:
        assert nodes[child]["parent"] == entry, f"{child} is no child of {entry}"
        assert nodes[child]["previous_sibling"] == previous, f"siblings of {child}"
        previous, child = child, nodes[child]["next_sibling"]


def _check_bucket(index: SegmentIndex, bucket: int) -> list[int]:
    members: list[int] = []
    contents: set[tuple[int, bytes]] = set()
    previous, head = -1, int(index.heads[bucket])
    while head >= 0:
        node = index.nodes[head]
        assert node["is_head"], f"entry {head} is in a chain, but no head"
        assert node["previous_group"] == previous, f"chain at entry {head}"
        content = _content(index, head)
        assert content not in contents, f"two groups with the content of entry {head}"
        contents.add(content)
        members += _check_group(index, head, bucket)
        previous, head = head, int(node["next_group"])
    return members


def _check_group(index: SegmentIndex, head: int, bucket: int) -> list[int]:
    nodes, members = index.nodes, []
    twin = head
    while True:
        node = nodes[twin]
        assert node["key"] == nodes[head]["key"], f"entry {twin} is in the wrong group"
        assert _content(index, twin) == _content(index, head), f"entry {twin} is no twin of {head}"
        assert int(node["key"]) % index.heads.size == bucket, f"bucket of {twin}"
        assert bool(node["is_head"]) == (twin == head), f"group with two heads: {twin}"
        assert nodes[node["next_twin"]]["previous_twin"] == twin, f"ring at {twin}"
        members.append(twin)
        twin = int(node["next_twin"])
        if twin == head:
            return members


def _content(index: SegmentIndex, entry: int) -> tuple[int, bytes]:
    node = index.nodes[entry]
    return int(node["namespace"]), index.tokens[node["block"]].tobytes()
