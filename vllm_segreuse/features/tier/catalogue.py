# SPDX-License-Identifier: Apache-2.0
"""The records of the second tier: which there are, where they are, and who finds them.

A record is an entry of the segment index, behind the blocks of vLLM's pool. It is *shown* there as
soon as its content may be read, and removed when host memory and files have both lost it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from segreuse_store import StoredRecord
from vllm_segreuse.cache.index import BlockFacts, SegmentIndex
from vllm_segreuse.cache.links import NODE
from vllm_segreuse.cache.namespace import HeldNamespaces, NamespaceTable, has_lora
from vllm_segreuse.features.tier.record import About, Record, Seen, unpacked

_FIELD = {name: place for place, name in enumerate(NODE.names or ())}
_BORN, _NAMESPACE, _BLOCK, _NEXT_VIEW = map(
    _FIELD.__getitem__, ("born", "namespace", "block", "next_view")
)
_POSITION, _DEPTH = _FIELD["position"], _FIELD["depth"]
_PARENT, _FIRST_CHILD, _NEXT_SIBLING = map(
    _FIELD.__getitem__, ("parent", "first_child", "next_sibling")
)

MAX_TOLD = 64
"""Namespaces of a record that files are told of: those that came to know it last."""

_EXACT_KEYS = 1 << 14
"""Keys of exact names that are remembered: requests that wait ask for theirs in every step."""


class RecordCatalogue:
    """One per engine.

    Attributes:
        first_entry: lowest id of a record in the index.
        end_entry: behind the highest that a record may get; what finds none free is not shown.
        num_in_host, num_on_disk: records there.
        held: references on namespaces, of what was seen and is not shown yet.

    Args:
        index: of blocks and records.
        namespaces: of the ids in the index.
        num_blocks: of vLLM's pool; entries have the ids behind.
        key_of: key of a block of the pool; None: it has no name.
        exact_key: key of the record of a block, by vLLM's exact name of it; None: exact records are
            not looked for.
    """

    def __init__(
        self,
        index: SegmentIndex,
        namespaces: NamespaceTable,
        num_blocks: int,
        key_of: Callable[[int], bytes | None],
        exact_key: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.first_entry, self.end_entry = num_blocks, index.num_blocks
        self.block_size = index.block_size
        self._index = index
        self._namespaces = namespaces
        self.held = HeldNamespaces(namespaces)
        self._key_of = key_of
        self._exact_key = None if exact_key is None else lru_cache(_EXACT_KEYS)(exact_key)
        self._by_key: dict[bytes, Record] = {}
        self._by_entry: dict[int, Record] = {}
        self._children: dict[bytes, set[Record]] = {}
        self._free: list[int] = []
        self._next = num_blocks
        self.num_in_host = self.num_on_disk = 0

    @property
    def step(self) -> int:
        """Of the index; what is named from now on is born in it, or later."""
        return self._index.step

    def clear(self) -> None:
        """Forget all records, and what was seen; the index is cleared by its owner."""
        self.held.release_all()
        for kept in (self._by_key, self._by_entry, self._children, self._free):
            kept.clear()
        self._next = self.first_entry
        self.num_in_host = self.num_on_disk = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: bytes) -> Record | None:
        """The record with a key."""
        return self._by_key.get(key)

    def exact_entry(self, name: bytes) -> int:
        """Entry of the record that holds the KV of a block with an exact name, to the last bit.

        Args:
            name: vLLM's, with its group.

        Returns:
            -1: there is none.
        """
        record = None if self._exact_key is None else self.get(self._exact_key(name))
        return record.entry if record is not None and record.is_exact else -1

    def at(self, entry: int) -> Record:
        """The record of an entry of the index."""
        return self._by_entry[entry]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_key.values())

    # From blocks to records.

    def see(self, blocks: Sequence[int], *, evicted: bool) -> list[Seen]:
        """What the index knows of blocks that are stored together; without those that do not
        donate, have no KV yet, or hold images or text behind them.

        Their namespaces are held until `done_with`, or until their records are shown.

        Args:
            evicted: whether the index is about to lose them.
        """
        keys: dict[int, bytes | None] = {}  # parents are among the blocks, as a rule

        def key_at(block: int) -> bytes | None:
            if block not in keys:
                keys[block] = self.key_at(block)
            return keys[block]

        together = frozenset(blocks)
        every = (self._see(block, key_at, together) for block in blocks)
        found = [seen for seen in every if seen is not None]
        if not evicted:
            return found
        return [seen._replace(knowers=self._index.known.detach(seen.block)) for seen in found]

    def _see(
        self, block: int, key_at: Callable[[int], bytes | None], together: frozenset[int]
    ) -> Seen | None:
        nodes = self._index.nodes
        node = first = nodes[block].item()  # at once: a field at a time takes as long each
        if first[_BORN] in (0, self._index.step) or not self._index.is_text(block):
            return None
        key = key_at(block)
        if key is None:
            return None
        namespaces, children, parent = [first[_NAMESPACE]], [], first[_PARENT]
        while True:
            child = node[_FIRST_CHILD]
            while child >= 0:
                following = nodes[child].item()
                children.append(following[_BLOCK])
                child = following[_NEXT_SIBLING]
            if node[_NEXT_VIEW] < 0:
                break
            node = nodes[node[_NEXT_VIEW]].item()
            namespaces.append(node[_NAMESPACE])
            parent = max(parent, node[_PARENT])
        for namespace in namespaces:
            self.held.acquire(namespace)
        # Entries of further namespaces stand for a block, too; the first one is the block itself.
        parent_block = int(nodes[parent]["block"]) if parent >= self._index.num_blocks else parent
        tokens = self._index.tokens[block].copy()
        return Seen(
            key=key,
            about=About(tokens, first[_POSITION], first[_DEPTH], key_at(parent_block)),
            block=block,
            born=first[_BORN],
            namespaces=tuple(namespaces),
            parent_block=parent_block,
            children=tuple((child, key_at(child) or b"") for child in {*children} - together),
        )

    def done_with(self, seen: Seen) -> None:
        """Its namespaces need not be held any longer."""
        self._index.known.let_go(seen.knowers)
        for namespace in seen.namespaces:
            self.held.release(namespace)

    def key_at(self, block: int) -> bytes | None:
        """Key of a block of the pool, or of a record, by its id in the index; None: it has none."""
        if block < 0:
            return None
        if block < self.first_entry:
            return self._key_of(block)
        return self._by_entry[block].key

    def add(self, seen: Seen) -> Record:
        """A record that is not shown yet."""
        record = self._by_key[seen.key] = Record(seen)
        if record.about.parent is not None:
            self._children.setdefault(record.about.parent, set()).add(record)
        return record

    def place(self, record: Record, *, in_host: bool, on_disk: bool) -> None:
        """Where its content may be read from now on; what is nowhere, and not on its way, is
        removed."""
        self.num_in_host += in_host - record.in_host
        self.num_on_disk += on_disk - record.on_disk
        record.in_host, record.on_disk = in_host, on_disk
        if not (in_host or on_disk or record.storing):
            self._remove(record)

    def stored(self, record: Record) -> None:
        """The copy to host memory that was under way is over, or was never made."""
        record.storing = False
        self.place(record, in_host=record.in_host, on_disk=record.on_disk)

    def _remove(self, record: Record) -> None:
        if record.shown:
            self._index.remove([record.entry])
            del self._by_entry[record.entry]
            self._free.append(record.entry)
        self._settle(record)
        del self._by_key[record.key]
        if record.about.parent is not None:
            siblings = self._children[record.about.parent]
            siblings.discard(record)
            if not siblings:
                del self._children[record.about.parent]

    def _settle(self, record: Record) -> None:
        seen, record.last_seen = record.last_seen, None
        if seen is not None:
            self.done_with(seen)

    # From records to the index.

    def show(self, records: Sequence[Record]) -> None:
        """Let the index know records whose content may be read now, as far as it has room."""
        shown = [record for record in records if self._has_entry(record)]
        for run in _runs(shown):
            self._insert(run[0].namespaces[0], run)
            for record in run:
                if record.last_seen is not None:
                    self._index.known.attach(record.last_seen.knowers, record.entry)
            for namespace in run[0].namespaces[1:]:
                self._insert(namespace, run)
        for record in shown:
            del record.namespaces[:-MAX_TOLD]
            seen = record.last_seen
            self.adopt(record, () if seen is None else seen.children)
        for record in shown:
            self._settle(record)

    def _has_entry(self, record: Record) -> bool:
        entry = self._free.pop() if self._free else self._next
        if entry >= self.end_entry:
            return False
        self._next = max(self._next, entry + 1)
        record.entry = entry
        self._by_entry[entry] = record
        return True

    def see_again(self, record: Record, seen: Seen) -> None:
        """A block with the content of a record was removed from the index, or files know it in a
        further namespace. Who knows the block knows the record."""
        last = record.last_seen
        if last is not None:
            further = [name for name in seen.namespaces if name not in record.namespaces]
            record.namespaces += further
            for namespace in further:
                self.held.acquire(namespace)
            knowers = self._index.known.joined(last.knowers, seen.knowers)
            names = tuple(record.namespaces)
            record.last_seen = last._replace(namespaces=names, knowers=knowers)
            return
        self._index.known.attach(seen.knowers, record.entry)
        for namespace in seen.namespaces:
            if not self._index.knows(namespace, record.entry):
                self._insert(namespace, [record])
                record.namespaces.append(namespace)
        del record.namespaces[:-MAX_TOLD]
        self.adopt(record, seen.children)

    def _knowing(self, record: Record) -> list[int]:
        """Namespaces that know a record that is shown: who has it by itself, and others."""
        first = int(self._index.nodes[record.entry]["namespace"])
        names = dict.fromkeys([first, *record.namespaces])  # ids may be others' by now
        return [name for name in names if self._index.knows(name, record.entry)]

    def adopt(self, record: Record, children: Iterable[tuple[int, bytes]]) -> None:
        """Link what followed a record's block in its sequences to the record.

        Args:
            children: blocks of the pool that did so, with their keys then.
        """
        for child in self._children.get(record.key, ()):
            if child.shown and self._index.nodes[child.entry]["parent"] < 0:
                for namespace in self._knowing(child):
                    self._insert(namespace, [child])
        for block, key in children:
            if block < self.first_entry and self._key_of(block) == key:
                self._link_block(block, record)

    def _link_block(self, block: int, parent: Record) -> None:
        node = self._index.nodes[block]
        if not node["born"]:
            return
        self._index.insert(
            int(node["namespace"]),
            np.asarray([block], np.int32),
            self._index.tokens[block].copy(),
            int(node["position"]),
            parent_block=parent.entry,
            depths=int(node["depth"]),
            facts=BlockFacts(
                fresh=False,
                contexts=self._index.contexts[[block]],
                position_offsets=self._index.position_offsets_of(np.asarray([block], np.int32)),
            ),
        )

    def _insert(self, namespace: int, run: Sequence[Record]) -> None:
        first = run[0]
        self._index.insert(
            namespace,
            np.asarray([record.entry for record in run], np.int32),
            np.concatenate([record.about.tokens for record in run]),
            first.about.position,
            parent_block=self._parent_block(first),
            depths=np.asarray([record.about.depth for record in run], np.int32),
            facts=BlockFacts(fresh=False),
        )

    def _parent_block(self, record: Record) -> int:
        """Who holds the block in front of a record now: vLLM's pool, a record, or nobody."""
        if record.about.parent is None:
            return -1
        seen = record.last_seen
        before = -1 if seen is None else seen.parent_block
        if 0 <= before < self.first_entry and self._key_of(before) == record.about.parent:
            return before
        parent = self._by_key.get(record.about.parent)
        return -1 if parent is None else parent.entry

    def restore(self, found: Iterable[StoredRecord], namespace: int) -> None:
        """Records that files hold of a namespace, from before the start.

        Args:
            found: in files; `about` is `packed`.
            namespace: id of the namespace, which is in use.
        """
        new: list[Record] = []
        for stored in found:
            seen = Seen(stored.key, unpacked(stored.about), namespaces=(namespace,))
            record = self._by_key.get(stored.key)
            if record is None:
                self.held.acquire(namespace)
                record = self.add(seen)
                new.append(record)
            else:
                self.see_again(record, seen)
            self.place(record, in_host=record.in_host, on_disk=True)
        self.show(new)

    def told(self, record: Record) -> list[bytes] | None:
        """Keys of the namespaces that files are told of: those that came to know the record last,
        `MAX_TOLD` at most. They contain salts: what is written holds digests of them only.

        Returns:
            None: the record must not be written to any file.
        """
        if not record.shown:
            return None
        namespaces = [*map(self._namespaces.key, self._knowing(record)[-MAX_TOLD:])]
        return None if any(map(has_lora, namespaces)) else namespaces


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """Records that followed each other, as one: an insertion of many costs little more than of
    one."""
    runs: list[list[Record]] = []
    open_runs: dict[bytes, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.about.position):
        run = open_runs.pop(record.about.parent, None) if record.about.parent is not None else None
        if run is None or run[-1].namespaces != record.namespaces:
            run = []
            runs.append(run)
        run.append(record)
        open_runs[record.key] = run
    return runs
