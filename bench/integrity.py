# SPDX-License-Identifier: Apache-2.0
"""Whether what an engine knows is consistent: every link both ways, every count recounted."""

from __future__ import annotations

from collections import Counter
from functools import singledispatch

import numpy as np

from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.known import FREE_CELL, FREE_MARK, UNUSED_CELL, UNUSED_MARK, Known
from vllm_segreuse.cache.links import FULL, RETURNED, UNUSED
from vllm_segreuse.cache.siblings import Siblings
from vllm_segreuse.features.knowledge.frozen import FrozenPart, FrozenPool
from vllm_segreuse.features.knowledge.kept import KeptEntries
from vllm_segreuse.features.tier.catalogue import RecordCatalogue
from vllm_segreuse.features.tier.record import Record

_SHARED = ["born", "position", "depth", "anchor", "block"]


@singledispatch
def check_integrity(kept: object) -> None:
    """AssertionError with what is wrong of an index, or of what a pool, a tier or its catalogue
    has."""
    raise TypeError(f"{type(kept).__name__} has no rules of integrity")


@check_integrity.register
def _check_index(index: SegmentIndex) -> None:
    """Walk every link both ways; O(blocks)."""
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
    check_integrity(index.known)
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


@check_integrity.register
def _check_marks(known: Known) -> None:
    """Recount all holds, and walk the cells of all blocks."""
    cells, holds = known._cells, np.zeros(known._cells.size, np.int64)
    marks = [mark for first in known._first_mark for mark in _marks_of(known, first)]
    ends = known._marks["cell"][marks].tolist()
    assert len(ends) == known.num_marks, f"{len(ends)} marks, but {known.num_marks} are counted"
    away = [cell for first in known._detached.values() for cell in known._same(first)]
    in_use, waiting = set[int](), [*ends, *away]
    np.add.at(holds, waiting, 1)
    while waiting:
        cell = waiting.pop()
        if cell not in in_use:
            in_use.add(cell)
            if (parent := int(cells["parent"][cell])) >= 0:
                holds[parent] += 1
                waiting.append(parent)
    assert len(in_use) == known.num_cells, f"{known.num_cells - len(in_use)} cells are lost"
    free = known._same(int(known._spares[FREE_CELL]))
    assert known._spares[UNUSED_CELL] == len(in_use) + len(free), "a free cell is lost"
    free = _marks_of(known, int(known._spares[FREE_MARK]) + 1)
    assert known._spares[UNUSED_MARK] == len(ends) + len(free), "a free mark is lost"
    used = sorted(in_use)
    assert (cells["holds"][used] == holds[used]).all(), "holds of cells"
    for block in np.flatnonzero(known._first_cell).tolist():
        mine = known._same(int(known._first_cell[block]) - 1)
        assert in_use.issuperset(mine), f"block {block} has a cell that is not in use"
        assert (cells["block"][mine] == block).all(), f"a cell of block {block} is another's"
    there = np.count_nonzero(cells["block"][used] >= 0)
    listed = sum(len(known._same(int(first) - 1)) for first in known._first_cell if first)
    assert there == listed, "a cell is not among those of its block"


def _marks_of(known: Known, first: int) -> list[int]:
    found, mark = [], int(first) - 1
    while mark >= 0:
        found.append(mark)
        mark = int(known._marks["following"][mark])
    return found


@check_integrity.register
def _check_frozen(pool: FrozenPool) -> None:
    """Entries and blocks know each other."""
    held = {name: entry.block_ids for name, entry in pool._entries.items()}
    for name, blocks in held.items():
        assert blocks, f"entry {name} holds nothing"
        wrong = [block for block in blocks if name not in pool._of_block.get(block, ())]
        assert not wrong, f"blocks {wrong} do not know their entry {name}"
    for block, names in pool._of_block.items():
        assert names, f"block {block} is frozen for nobody"
        assert len(set(names)) == len(names), f"block {block} names an entry twice"
        assert all(block in held[name] for name in names), f"block {block}: {names}"
        assert pool._blocks.references(block) > 0, f"block {block} is not held"
    assert pool.num_frozen <= pool.limit, f"{pool.num_frozen} frozen, allowed {pool.limit}"
    assert not pool._entries.keys() & pool._watched.keys(), "watched although frozen"


@check_integrity.register
def _check_kept(kept: KeptEntries) -> None:
    """Entries and records know each other, and where they are."""
    for name, entry in kept._entries.items():
        assert entry.keys == {key for part in entry.parts if part for key in part}, name
        places = [kept.place(key) for key in entry.keys]
        assert entry.num_here == sum(map(any, places)), name
        assert entry.num_on_host == sum(on_host for on_host, _ in places), name
    owners: dict[bytes, set[str]] = {}
    for name, entry in kept._entries.items():
        for key in entry.keys:
            owners.setdefault(key, set()).add(name)
    assert owners == kept._owners, "records do not know their entries"
    assert kept._places.keys() <= kept._owners.keys(), "a record of nobody has a place"


@check_integrity.register
def _check_catalogue(catalogue: RecordCatalogue) -> None:
    """Records know their children and their entries."""
    families: dict[bytes, set[Record]] = {}
    for record in catalogue:
        if record.about.parent is not None:
            families.setdefault(record.about.parent, set()).add(record)
    assert families == catalogue._children, "parents do not know their children"
    entries = {record.entry: record for record in catalogue if record.shown}
    assert entries == catalogue._by_entry, "records do not know their entries"
    free = {*range(catalogue.first_entry, catalogue._next)} - entries.keys()
    assert sorted(catalogue._free) == sorted(free), "entries are lost"


@check_integrity.register
def _check_siblings(siblings: Siblings) -> None:
    """What is said of a block and of its siblings agrees."""
    for row in siblings._of:
        blocks = np.flatnonzero(row >= 0)
        assert (siblings._whose[row[blocks]] == blocks).all(), "a sibling is another block's"
    for block in np.flatnonzero(siblings._whose >= 0):
        found = siblings._of[:, siblings._whose[block]]
        assert block in found, f"block {block} is nobody's sibling"


def frozen_parts(pool: FrozenPool) -> dict[str, list[FrozenPart]]:
    """The parts of each entry that are frozen so far."""
    return {
        name: [part for part in entry.parts if part is not None]
        for name, entry in pool._entries.items()
    }


def frozen_namespaces(pool: FrozenPool) -> Counter[int]:
    """References that the pool holds on namespaces."""
    parts = [part for entry in pool._entries.values() for part in entry.parts if part]
    return Counter(
        [part.namespace for part in parts] + [w.namespace for w in pool._watched.values()]
    )
