# SPDX-License-Identifier: Apache-2.0
"""Thousands of namespaces may know a block; each finds what it knows, and nothing else."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bench.integrity import check_integrity
from vllm_segreuse.cache import index as index_module
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.known import CELL, Known
from vllm_segreuse.cache.links import MAX_VIEWS
from vllm_segreuse.cache.matcher import find_matches
from vllm_segreuse.cache.namespace import NamespaceTable, namespace_key, owner_of
from vllm_segreuse.cache.rolling_hash import window_hashes

SIZE = 4
MANY = 10_000


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def found(index: SegmentIndex, namespace: int, prompt: np.ndarray):
    """What is found of a prompt in a namespace."""
    hashes = window_hashes(prompt, index.block_size)
    return find_matches(index, namespace, prompt, hashes, 0, prompt.size, 0)


def shared(blocks: int, names: int, **options) -> tuple[SegmentIndex, np.ndarray]:
    """An index whose blocks are one prompt that so many namespaces have had."""
    index = SegmentIndex(2 * blocks, SIZE, **options)
    prompt = np.arange(blocks * SIZE, dtype=np.int32)
    for namespace in range(names):
        index.insert(namespace, np.arange(blocks, dtype=np.int32), prompt, 0)
    index.begin_step()
    return index, prompt


def test_ten_thousand_namespaces_share_a_prompt() -> None:
    blocks = 50
    index, prompt = shared(blocks, MANY)
    for namespace in (0, 17, MANY // 2, MANY - 1, 3, MANY):
        matches = found(index, namespace, np.concatenate((ints(-5), prompt)))
        assert matches.num_tokens == (0 if namespace == MANY else prompt.size)
        assert matches.num_segments == (0 if namespace == MANY else 1)
    assert index.known.num_cells == blocks, "blocks are remembered once for all"
    assert index.known.num_bytes / MANY < 40
    assert index.nodes.size <= 2 * (MAX_VIEWS + 2) * index.num_blocks, "entries are few"
    check_integrity(index)
    index.remove([*range(blocks)])
    assert [index.population(namespace) for namespace in range(MANY)] == [0] * MANY
    assert index.known.num_marks == index.known.num_cells == 0, "nothing is left"
    check_integrity(index)


def test_a_namespace_takes_as_little_memory_as_the_pages_say() -> None:
    """With its name, and an owner of its own."""
    blocks, first, names = (
        125,
        64,
        NamespaceTable(lambda namespace: index.population(namespace) > 0),
    )
    index = SegmentIndex(2 * blocks, SIZE, owner_of=lambda name: owner_of(names.key(name)))
    prompt = np.arange(blocks * SIZE, dtype=np.int32)

    def begin(sessions: range) -> None:
        for session in sessions:
            key = namespace_key((f"session {session}",), None, None, ())
            namespace = names.intern(key)
            index.insert(namespace, np.arange(blocks, dtype=np.int32), prompt, 0)
            names.release(namespace)

    begin(range(first))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        begin(range(first, first + 2000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1500 * 2000
    assert len(names) == index.known.num_marks + 1 == first + 2000
    assert index.known.num_cells == blocks
    assert CELL.itemsize == 20


def test_a_block_that_is_evicted_is_known_to_nobody_whoever_gets_its_id() -> None:
    index, prompt = shared(3, 100)
    index.remove([1])
    index.insert(500, ints(1), ints(90, 91, 92, 93), 0)
    index.begin_step()
    for namespace in (0, 1, 50, 99):
        matches = found(index, namespace, prompt)
        assert matches.pieces.block.tolist() == [0, 2]
        assert matches.num_segments == 2
        assert found(index, namespace, ints(90, 91, 92, 93)).num_tokens == 0
    check_integrity(index)


def test_a_block_that_is_replaced_without_an_eviction_is_known_to_nobody_else() -> None:
    index, _ = shared(2, 100)
    index.insert(99, ints(1), ints(70, 71, 72, 73), SIZE)
    index.begin_step()
    known = [found(index, n, ints(70, 71, 72, 73)).num_tokens for n in range(100)]
    assert known == [0] * 99 + [SIZE]
    check_integrity(index)


def test_own_text_behind_a_shared_prompt_stays_linked_to_it(monkeypatch) -> None:
    """Its entries come and go with those of the namespace."""
    monkeypatch.setattr(index_module, "MAX_VIEWS", 2)
    index, prompt = shared(3, 8)
    answers = {n: np.arange(100 + 10 * n, 104 + 10 * n, dtype=np.int32) for n in (1, 2, 3)}
    for namespace, answer in answers.items():
        index.insert(namespace, ints(2 + namespace), answer, 3 * SIZE, parent_block=2)
        check_integrity(index)
    index.begin_step()
    for namespace in (1, 3, 2, 1, 3):
        matches = found(index, namespace, np.concatenate((prompt, answers[namespace])))
        assert (matches.num_tokens, matches.num_segments) == (prompt.size + SIZE, 1)
        check_integrity(index)


def test_own_text_stays_whatever_becomes_of_what_is_known_of_others(monkeypatch) -> None:
    """The own block is the first of the pool."""
    monkeypatch.setattr(index_module, "MAX_VIEWS", 1)
    index, prompt = SegmentIndex(8, SIZE), np.arange(2 * SIZE, dtype=np.int32)
    own = np.arange(50, 50 + SIZE, dtype=np.int32)
    for namespace in (0, 1):
        index.insert(namespace, ints(3, 4), prompt, 0)
    index.insert(1, ints(0), own, 0)
    index.remove([3])
    index.insert(2, ints(4), prompt[SIZE:], SIZE)  # the entries of 1 are dropped
    check_integrity(index)
    index.begin_step()
    assert found(index, 1, own).num_tokens == SIZE
    assert found(index, 1, prompt).num_tokens == SIZE
    check_integrity(index)


def test_what_is_learned_around_a_known_block_stays_linked_to_it(monkeypatch) -> None:
    monkeypatch.setattr(index_module, "MAX_VIEWS", 1)
    index, prompt = shared(3, 1)
    index.insert(1, ints(1), prompt[SIZE : 2 * SIZE], SIZE, parent_block=0)
    index.insert(1, ints(0, 1, 2), prompt, 0)
    assert found(index, 1, prompt).num_segments == 1
    index.insert(2, ints(0), prompt[:SIZE], 0)  # the entries of 1 are dropped
    assert found(index, 1, prompt).num_segments == 1
    check_integrity(index)


@pytest.mark.parametrize("answers", [1, 2, 5])
def test_all_own_text_behind_a_shared_block_stays_linked_to_it(monkeypatch, answers) -> None:
    """Also in the first block of the pool, which another answer was put in front of."""
    monkeypatch.setattr(index_module, "MAX_VIEWS", 1)
    index, prompt = SegmentIndex(8, SIZE), np.arange(SIZE, dtype=np.int32)
    for namespace in (0, 1):
        index.insert(namespace, ints(7), prompt, 0)
    for block in range(answers):
        text = np.arange(100 + 10 * block, 104 + 10 * block, dtype=np.int32)
        index.insert(1, ints(block), text, SIZE, parent_block=7)
    index.insert(2, ints(7), prompt, 0)
    index.begin_step()
    for namespace in (2, 1, 2, 1):
        index.show(namespace)
        check_integrity(index)
    for block in range(answers):
        text = np.arange(100 + 10 * block, 104 + 10 * block, dtype=np.int32)
        assert found(index, 1, np.concatenate((prompt, text))).num_segments == 1


def test_shared_text_behind_own_text_stays_linked_to_it(monkeypatch) -> None:
    monkeypatch.setattr(index_module, "MAX_VIEWS", 1)
    index, prompt = SegmentIndex(8, SIZE), np.arange(2 * SIZE, dtype=np.int32)
    index.insert(0, ints(0), prompt[:SIZE], 0)
    index.insert(1, ints(0, 1), prompt, 0)  # 1 goes on where 0 ended
    index.insert(0, ints(1), prompt[SIZE:], SIZE, parent_block=0)
    index.begin_step()
    for namespace in (0, 1, 0):
        assert found(index, namespace, prompt).num_segments == 1
        check_integrity(index)


def test_who_has_computed_a_block_anew_does_not_see_it_twice() -> None:
    """The first of the pool, which takes the place of one that others had computed."""
    index, prompt = SegmentIndex(8, SIZE), np.arange(SIZE, dtype=np.int32)
    for namespace in (0, 1):
        index.insert(namespace, ints(3), prompt, 0)
    handle = index.known.detach(3)
    index.remove([3])
    index.insert(1, ints(0), prompt, 0)
    index.known.attach(handle, 0)
    index.begin_step()
    for namespace in (1, 0, 1):
        assert found(index, namespace, prompt).num_tokens == (SIZE if namespace else 0)
        check_integrity(index)
    assert index.nodes["born"].astype(bool).sum() == 1


def test_an_id_that_is_given_anew_knows_nothing_of_its_predecessor() -> None:
    index = SegmentIndex(4, SIZE)
    names = NamespaceTable(lambda namespace: index.population(namespace) > 0)
    prompt = np.arange(SIZE, dtype=np.int32)
    first = names.intern(b"first")
    index.insert(first, ints(0), prompt, 0)
    gone = names.intern(b"gone")
    index.insert(gone, ints(0), prompt, 0)
    index.remove([0])
    names.release(gone)
    index.insert(first, ints(0), prompt, 0)
    index.begin_step()
    assert names.intern(b"new") == gone
    assert found(index, gone, prompt).num_tokens == 0


def test_ids_of_short_lived_namespaces_are_used_again() -> None:
    """One name per session, and a prompt that is evicted now and then."""
    index = SegmentIndex(4, SIZE)
    names = NamespaceTable(lambda namespace: index.population(namespace) > 0)
    prompt = np.arange(SIZE, dtype=np.int32)
    for session in range(4000):
        namespace = names.intern(str(session).encode())
        index.insert(namespace, ints(0), prompt, 0)
        names.release(namespace)
        if session % 100 == 99:
            index.remove([0])
    assert len(names) < 1000
    assert index.known.num_marks < 1000
    check_integrity(index)


def test_whoever_knows_the_most_gives_back_what_was_used_longest_ago(monkeypatch) -> None:
    names = 300
    owner_of = lambda namespace: "few" if namespace < 3 else "many"  # noqa: E731
    monkeypatch.setattr(index_module, "MAX_KNOWN_PREFIXES", names // 2)
    index = SegmentIndex(8, SIZE, owner_of=owner_of)
    prompt = np.arange(2 * SIZE, dtype=np.int32)
    for namespace in range(names):
        index.insert(namespace, ints(0, 1), prompt, 0)
        index.missing(50, ints(0))  # it is in use all the time
    index.begin_step()
    known = [n for n in range(names) if found(index, n, prompt).num_tokens]
    assert len(known) == names // 2 + 1, "and the one that has computed it"
    assert known[:3] == [0, 1, 2], "another owner's names push out none of theirs"
    assert 50 in known
    latest = [n for n in known if n > 50]
    assert latest == [*range(names - len(latest), names)]
    check_integrity(index)


def test_of_blocks_that_are_known_behind_others_each_time_not_all_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(index_module, "MAX_KNOWN_PREFIXES", 4)
    monkeypatch.setattr(index_module, "MAX_KNOWN_PER_BLOCK", 1)
    index, prompt = shared(4, 2)
    index.insert(2, ints(1, 2, 3), prompt[SIZE:], SIZE)  # behind text that it does not know
    assert index.known.num_cells == 7
    index.insert(3, ints(4), ints(50, 51, 52, 53), 0)
    index.insert(2, ints(4), ints(50, 51, 52, 53), 0)
    assert index.known.num_cells == index.num_blocks == 8
    assert [index.knows(namespace, 1) for namespace in (1, 2)] == [True, True]
    version = index.version
    index.insert(1, ints(4), ints(50, 51, 52, 53), 0, parent_block=3)
    assert [index.knows(namespace, 1) for namespace in (0, 1, 2)] == [True, True, False]
    assert index.known.num_cells == 8, "all but that of block 4 behind nothing"
    assert index.version > version + 1, "what a namespace finds has changed"
    check_integrity(index)


def test_namespaces_do_not_learn_of_what_others_know() -> None:
    index, prompt = shared(4, 5)
    index.insert(7, ints(4), ints(50, 51, 52, 53), 4 * SIZE, parent_block=3)
    index.insert(8, ints(0, 1), prompt[: 2 * SIZE], 0)
    index.begin_step()
    assert found(index, 8, prompt).num_tokens == 2 * SIZE
    assert found(index, 7, prompt).num_tokens == 0
    assert not index.knows(8, 3)
    assert index.knows(4, 3)
    assert found(index, 4, ints(50, 51, 52, 53)).num_tokens == 0


def test_handles_mean_nothing_after_everything_was_forgotten() -> None:
    before, after = Known(4), Known(4)
    for known in (before, after):
        known.add(3, -1, 0, ints(0), np.array([9], np.uint32))
    handle = before.detach(0)
    other = after.detach(0)
    after.attach(handle, 1)
    assert other != handle
    assert after.table(3)[:, 0].tolist() == [-2]
    after.attach(other, 2)
    assert after.table(3)[:, 0].tolist() == [2]
    after.attach(other, 1)
    after.let_go(other)
    assert after.table(3)[:, 0].tolist() == [2], "it is done with"
    check_integrity(after)


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_what_is_known_is_listed_with_what_is_in_front_the_latest_prefix_first() -> None:
    known = Known(8)
    known.add(3, -1, 0, ints(5, 0), keys(50, 10))
    known.add(3, 0, 10, ints(6, 7), keys(60, 70))
    known.add(4, 2, 20, ints(1), keys(11))
    table = known.table(3)
    assert table[:, :3].tolist() == [[6, 60, 0], [7, 70, 6], [5, 50, -1], [0, 10, 5]]
    assert known.blocks_of(table[:, 3]).tolist() == [6, 7, 5, 0]
    assert known.table(4)[:, :3].tolist() == [[1, 11, 2]], "of the block in front, only its key"
    handle = known.detach(6)
    known.evicted(np.array([5, 8, -1], np.int64))
    assert known.table(3)[:, :3].tolist() == [[-2, 60, 0], [7, 70, -2], [-1, 50, -1], [0, 10, -1]]
    assert known.keys_of_gone(3).tolist() == [50]
    assert (known.count(3), known.num_cells, known.num_detached) == (3, 6, 1)
    known.attach(handle, 4)
    assert known.table(3)[:2, :3].tolist() == [[4, 60, 0], [7, 70, 4]]
    assert (known.table(9).shape, known.count(9), known.prune(9)) == ((0, 4), 0, 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_two_blocks_were_known_as_is_joined_the_very_first_too(order: tuple[int, int]) -> None:
    known = Known(4)
    for block in (0, 1):
        known.add(block, -1, 0, ints(block), keys(9))
    first, second = (known.detach(block) for block in order)
    known.attach(known.joined(first, second), 3)
    assert [known.table(name)[:, 0].tolist() for name in (0, 1)] == [[3], [3]]
    known.attach(known.joined(known.detach(3), 0), 2)
    assert [known.table(name)[:, 0].tolist() for name in (0, 1)] == [[2], [2]]
    known.attach(known.joined(0, known.detach(2)), 0)
    assert [known.table(name)[:, 0].tolist() for name in (0, 1)] == [[0], [0]]
    assert known.joined(0, 0) == known.detach(3) == 0
    known.let_go(known.detach(0))
    assert [known.count(name) for name in (0, 1)] == [0, 0]
    check_integrity(known)


def test_prefixes_that_begin_alike_share_what_they_have_in_common() -> None:
    known = Known(8)
    known.add(0, -1, 0, ints(0, 1, 2), keys(0, 1, 2))
    known.add(1, -1, 0, ints(0, 1, 3), keys(0, 1, 3))
    known.add(2, -1, 0, ints(1), keys(1))  # behind nothing: another one
    assert (known.num_marks, known.num_cells) == (3, 5)
    known.forget(0)
    assert (known.num_marks, known.num_cells) == (2, 4)
    known.forget(1)
    known.forget(2)
    assert (known.num_marks, known.num_cells) == (0, 0)
    check_integrity(known)


class Moving(RuleBasedStateMachine):
    """Blocks that are known, detached, attached, joined and lost, against the obvious model."""

    blocks = st.integers(0, 7)
    names = st.integers(0, 4)

    @initialize()
    def begin(self) -> None:
        self.known = Known(8)
        self.of_name: dict[int, list[list[object]]] = {n: [] for n in range(5)}  # by prefix
        self.at: dict[int, list[object]] = {b: [] for b in range(8)}
        self.away: dict[int, list[object]] = {}
        self.place: dict[object, int] = {}
        self.attached = 0

    def _places(self, name: int) -> list[int]:
        return [self.place[token] for tokens in self.of_name[name] for token in tokens]

    @rule(name=names, ids=st.lists(blocks, min_size=1, max_size=4, unique=True), parent=blocks)
    def add(self, name: int, ids: list[int], parent: int) -> None:
        mine = self._places(name)
        ids = [block for block in ids if block not in mine]
        if not ids:
            return
        keys = np.array(ids, np.uint32)
        self.known.add(name, -1 if parent in ids else parent, parent, ints(*ids), keys)
        self.of_name[name].append([])
        for block in ids:
            token = object()
            self.of_name[name][-1].append(token)
            self.at[block].append(token)
            self.place[token] = block

    def _move(self, tokens: list[object], place: int) -> None:
        for token in tokens:
            self.place[token] = place

    @rule(ids=st.lists(blocks, max_size=3))
    def lose(self, ids: list[int]) -> None:
        self.known.evicted(np.array(ids, np.int64))
        for block in ids:
            self._move(self.at[block], -1)
            self.at[block] = []

    @rule(block=blocks)
    def detach(self, block: int) -> None:
        tokens, self.at[block] = self.at[block], []
        handle = self.known.detach(block)
        if handle:
            self.away[handle] = tokens
            self._move(tokens, -2)
        else:
            assert not tokens

    @rule(block=blocks, data=st.data())
    def attach(self, block: int, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from([0, *self.away]))
        self.known.attach(handle, block)
        self.attached += handle != 0
        tokens = self.away.pop(handle, [])
        self._move(tokens, block)
        self.at[block] += tokens

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from([0, *self.away]))
        self.known.let_go(handle)
        self._move(self.away.pop(handle, []), -1)

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        first, second = (data.draw(st.sampled_from([0, *self.away])) for _ in range(2))
        if first == second:
            return
        joined = self.known.joined(first, second)
        tokens = self.away.pop(first, []) + self.away.pop(second, [])
        assert bool(joined) == bool(first or second)
        if joined:
            self.away[joined] = tokens

    @rule(name=names)
    def forget(self, name: int) -> None:
        self.known.forget(name)
        for token in (token for tokens in self.of_name[name] for token in tokens):
            for tokens in (*self.at.values(), *self.away.values()):
                if token in tokens:
                    tokens.remove(token)
        self.of_name[name] = []

    @rule(name=names)
    def prune(self, name: int) -> None:
        left = [
            tokens
            for tokens in self.of_name[name]
            if any(self.place[token] != -1 for token in tokens)
        ]
        assert self.known.prune(name) == len(left)
        self.of_name[name] = left

    @invariant()
    def it_is_what_it_is(self) -> None:
        for name in self.of_name:
            places = self._places(name)
            assert sorted(self.known.table(name)[:, 0].tolist()) == sorted(places)
            assert self.known.count(name) == sum(place != -1 for place in places)
        assert self.known.num_marks == sum(map(len, self.of_name.values()))
        assert self.known.num_detached == len(self.away)
        assert self.known.changes == self.attached
        check_integrity(self.known)


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=30, stateful_step_count=30)
