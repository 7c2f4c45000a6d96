# SPDX-License-Identifier: Apache-2.0
"""Frozen blocks: held as long as wanted and affordable, given back in order, never leaked."""

from collections import Counter
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bench.integrity import check_integrity, frozen_namespaces
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.features.knowledge.frozen import FrozenPart, FrozenPool
from vllm_segreuse.plan import FreezeOrder

TOTAL = 20


class Blocks:
    """A block pool that counts."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def pin(self, block_ids: list[int]) -> None:
        self.held.update(block_ids)

    def unpin(self, block_ids: list[int]) -> None:
        for block in block_ids:
            assert self.held[block] > 0, f"block {block} is let go more often than held"
            self.held[block] -= 1

    def references(self, block_id: int) -> int:
        return self.held[block_id]

    def num_free_blocks(self) -> int:
        return TOTAL - sum(n > 0 for n in self.held.values())


class Pool(FrozenPool):
    """A frozen pool of which tests see who counts its references."""

    def __init__(self, limit: int = 16, pressure: float = 0.9, returns: bool = True) -> None:
        self.blocks, self.table = Blocks(), NamespaceTable(lambda namespace: False)
        ticks = count()
        super().__init__(
            self.blocks, self.table, TOTAL, limit, pressure, returns, lambda: float(next(ticks))
        )
        for key in (b"a", b"b"):
            self.table.intern(key)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def order(name: str, part: int = 0, parts: int = 1) -> FreezeOrder:
    return FreezeOrder(name, part, parts, 0)


def part(*block_ids: int, namespace: int = 0, probe: int | None = 7) -> FrozenPart:
    return FrozenPart(namespace, list(block_ids), probe)


def test_an_order_survives_its_way_to_the_scheduler() -> None:
    for written in (FreezeOrder("f00d", 2, 3, 17), FreezeOrder("f", 0, 1, 0)):
        assert FreezeOrder.parse(written.encode()) == written


@pytest.mark.parametrize("text", ["", "a", "a:0:0:0", "a:1:1:0", ":0:1:0", "a:0:1:-1", "a:0:1:0:0"])
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        FreezeOrder.parse(text)


def test_a_document_is_warm_once_all_its_parts_are_frozen(pool: Pool) -> None:
    assert pool.add(order("doc", 0, 2), part(1, 2))
    assert pool.warm() == {}
    assert pool.add(order("doc", 1, 2), part(3))
    assert pool.warm() == {"doc": (3, 0)}
    pool.release(["doc", "doc", "never there"])
    assert pool.warm() == {}
    assert pool.blocks.num_free_blocks() == TOTAL


def test_what_may_be_evicted_makes_way_in_order() -> None:
    pool = Pool(limit=8)
    for first, name in ((1, "read"), (3, "old"), (5, "new"), (7, "kept")):
        assert pool.add(order(name), part(first, first + 1))
    pool.blocks.pin([1, 2])
    others = {"read", "old", "new"}
    assert pool.add(order("kept"), part(9, 10), instead_of=others), "it is there already"
    assert not pool.add(order("more"), part(9))
    assert pool.add(order("more"), part(9), instead_of=others)
    assert sorted(pool.warm()) == ["kept", "more", "new", "read"]
    assert pool.add(order("further"), part(10), instead_of=others), "there was room"
    assert sorted(pool.warm()) == ["further", "kept", "more", "new", "read"]
    assert not pool.add(order("large"), part(*range(11, 17)), instead_of=others)
    assert sorted(pool.warm()) == ["further", "kept", "more"]
    check_integrity(pool)


def test_freezing_twice_holds_once(pool: Pool) -> None:
    for _ in range(2):
        assert pool.add(order("doc"), part(1, 2))
    assert pool.blocks.held == {1: 1, 2: 1}


def test_blocks_of_two_documents_are_held_until_both_are_gone(pool: Pool) -> None:
    pool.add(order("one"), part(1, 2))
    pool.add(order("two"), part(1, 3))
    assert pool.num_frozen == 3
    pool.release(["one"])
    assert pool.blocks.held[1] == 1
    pool.release(["two"])
    assert pool.blocks.num_free_blocks() == TOTAL


def test_over_the_limit_nothing_of_the_document_stays(pool: Pool) -> None:
    pool.add(order("small"), part(1))
    assert pool.add(order("large", 0, 2), part(*range(2, 10)))
    assert not pool.add(order("large", 1, 2), part(*range(10, 18)))
    assert pool.warm() == {"small": (1, 0)}
    assert pool.num_frozen == 1


def test_parts_of_a_document_that_was_evicted_meanwhile_are_not_frozen(pool: Pool) -> None:
    pool.add(order("doc", 0, 2), part(1, 2))
    pool.make_free(1)
    assert not pool.add(order("doc", 1, 2), part(3))
    assert pool.num_frozen == 0


def test_the_limit_may_be_reached_and_never_exceeds_the_pool() -> None:
    pool = Pool(limit=3)
    assert pool.add(order("three"), part(1, 2, 3))
    assert not pool.add(order("one"), part(4))
    assert pool.add(order("shares"), part(1, 2)), "its blocks are frozen already"
    assert (Pool(limit=10**6).limit, Pool(limit=-1).limit) == (TOTAL, 0)


def test_a_document_in_other_parts_is_refused(pool: Pool) -> None:
    pool.add(order("doc", 0, 2), part(1))
    with pytest.raises(ValueError, match="doc has 2 parts, not 3: release it first"):
        pool.add(order("doc", 2, 3), part(2))
    check_integrity(pool)


def test_a_part_without_a_block_is_refused(pool: Pool) -> None:
    """Nobody could be said to read it."""
    with pytest.raises(ValueError, match="part 0 of doc holds no block"):
        pool.add(order("doc"), part())
    assert (pool.warm(), pool.num_frozen) == ({}, 0)


def test_under_pressure_the_longest_unused_goes_first_until_pressure_is_gone() -> None:
    pool = Pool(pressure=0.5)
    for i, name in enumerate("abcd"):
        pool.add(order(name), part(3 * i, 3 * i + 1, 3 * i + 2))
    pool.used([0])  # a
    pool.relieve()  # 12 of 20 in use: one of them must go
    assert sorted(pool.warm()) == ["a", "c", "d"]
    assert pool.num_evicted == 1
    pool.relieve()
    assert len(pool.warm()) == 3


@pytest.mark.parametrize(("in_use", "stays"), [(10, True), (11, False)])
def test_as_many_blocks_may_be_in_use_as_the_pressure_says(in_use: int, stays: bool) -> None:
    pool = Pool(pressure=0.5)
    pool.add(order("doc"), part(0, 1))
    pool.blocks.pin([*range(2, in_use)])
    pool.relieve()
    assert ("doc" in pool) == stays
    assert pool.num_evicted == (not stays)


def test_who_names_an_entry_of_another_namespace_does_not_have_it_back(pool: Pool) -> None:
    pool.add(order("doc"), part(1, namespace=1))
    pool.make_free(1)
    pool.named(0, ["doc", "never there"])
    assert pool.wanted() == []
    pool.named(1, ["doc"])
    assert pool.wanted() == ["doc"]


def test_the_pool_is_the_sole_holder_until_somebody_else_holds_a_block(pool: Pool) -> None:
    assert pool.is_sole_holder()
    pool.add(order("doc"), part(1, 2))
    assert pool.is_sole_holder()
    for block in (1, 9):
        pool.blocks.pin([block])
        assert not pool.is_sole_holder()
        pool.blocks.unpin([block])
    assert pool.is_sole_holder()


def test_what_was_just_frozen_counts_as_used(pool: Pool) -> None:
    pool.add(order("old"), part(1))
    pool.used([1])
    pool.add(order("new"), part(2))
    assert pool.make_free(1) == 1
    assert list(pool.warm()) == ["new"]


def test_no_more_goes_than_has_to(pool: Pool) -> None:
    for i in range(4):
        pool.add(order(f"doc {i}"), part(2 * i, 2 * i + 1))
    assert pool.make_free(0) == 0
    assert pool.make_free(2) == 2
    assert pool.make_free(3) == 4
    assert list(pool.warm()) == ["doc 3"]
    assert pool.num_evicted == 3


def test_blocks_are_evicted_from_the_end_of_a_document(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it is a prefix, which is still of use."""
    let_go: list[int] = []
    monkeypatch.setattr(pool.blocks, "unpin", let_go.extend)
    pool.add(order("doc"), part(3, 1, 2))
    pool.release(["doc"])
    assert let_go == [2, 1, 3]


def test_what_running_requests_hold_goes_last(pool: Pool) -> None:
    pool.add(order("read"), part(1, 2))
    pool.add(order("idle"), part(3, 4))
    pool.used([3])
    pool.blocks.pin([1, 2])
    assert pool.warm()["read"] == (2, 1)
    assert pool.make_free(1) == 2
    assert sorted(pool.warm()) == ["read"]
    assert pool.make_free(1) == 0  # given back, but its reader holds it still
    pool.blocks.unpin([1, 2])
    assert pool.blocks.num_free_blocks() == TOTAL


def test_reclaimable_are_blocks_nobody_else_holds(pool: Pool) -> None:
    pool.add(order("doc"), part(1, 2, 3))
    pool.blocks.pin([1])
    assert pool.num_reclaimable() == 2


def test_a_document_that_was_evicted_returns_when_a_prompt_contains_it(pool: Pool) -> None:
    pool.add(order("doc"), part(1, 2, probe=11))
    pool.make_free(1)
    assert pool.wanted() == []
    hashes = np.array([3, 11, 5], np.uint64)
    pool.notice(1, lambda: hashes)
    assert pool.wanted() == [], "another namespace has the same text"
    pool.notice(0, lambda: hashes)
    assert pool.wanted() == ["doc"]
    pool.notice(0, lambda: np.array([4], np.uint64))
    assert pool.wanted() == ["doc"], "other prompts change nothing"
    pool.add(order("doc"), part(1, 2, probe=11))
    assert pool.wanted() == []


def test_half_a_document_and_one_without_a_probe_do_not_return(pool: Pool) -> None:
    pool.add(order("half", 0, 2), part(1, probe=11))
    pool.add(order("short"), part(2, probe=None))
    pool.add(order("whole"), part(3, probe=12))
    pool.make_free(3)
    assert pool.num_frozen == 0
    pool.notice(0, lambda: np.array([11, 12], np.uint64))
    assert pool.wanted() == ["whole"]


def test_those_who_return_share_the_room(pool: Pool) -> None:
    pool.add(order("one"), part(1, 2, probe=11))
    pool.add(order("two"), part(3, 4, probe=12))
    pool.make_free(4)
    pool.notice(0, lambda: np.array([11, 12], np.uint64))
    pool.blocks.pin(list(range(5, 20)))  # 15 of 18 that are allowed
    assert pool.wanted() == ["one"]
    pool.release(["one"])
    assert pool.wanted() == ["two"], "who is deleted is not waited for"


def test_it_does_not_return_into_pressure(pool: Pool) -> None:
    pool.add(order("doc"), part(1, 2, probe=11))
    pool.make_free(1)
    pool.notice(0, lambda: np.array([11], np.uint64))
    pool.blocks.pin(list(range(3, 20)))  # 17 of 20; 18 are allowed
    assert pool.wanted() == []
    pool.blocks.unpin([3])
    assert pool.wanted() == ["doc"]


def test_nothing_returns_by_itself_if_told_so_or_after_a_reset(pool: Pool) -> None:
    stays = Pool(returns=False)
    stays.add(order("doc"), part(1))
    stays.make_free(1)
    pool.add(order("doc"), part(1))
    pool.reset()
    for one in (stays, pool):
        one.notice(0, lambda: pytest.fail("nothing is watched"))
        assert one.wanted() == []


def test_uses_are_counted_once_per_request_and_taken_once(pool: Pool) -> None:
    pool.add(order("doc"), part(1, 2))
    pool.used([1, 2, 9])
    pool.used([2])
    assert pool.take_uses()["doc"] == (2, 2.0)
    assert pool.take_uses() == {}
    pool.used([1])
    pool.release(["doc"])
    assert pool.take_uses() == {}, "nobody asks about what was deleted"


def test_a_block_that_loses_its_name_makes_its_documents_cold(pool: Pool) -> None:
    pool.add(order("one"), part(1, 2))
    pool.add(order("two"), part(1, 3))
    pool.add(order("three"), part(4))
    pool.lost([1])
    assert sorted(pool.warm()) == ["three"]


class Machine(RuleBasedStateMachine):
    """Any order of events: references, limit and namespaces always add up."""

    names = st.sampled_from("abcdef")
    blocks = st.lists(st.integers(0, TOTAL - 1), min_size=1, max_size=6, unique=True)

    @initialize(limit=st.integers(0, TOTAL), pressure=st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    def start(self, limit: int, pressure: float) -> None:
        self.pool, self.pressure = Pool(limit, pressure), pressure
        self.requests: list[list[int]] = []

    @rule(name=names, blocks=blocks, index=st.integers(0, 1), namespace=st.integers(0, 1))
    def add(self, name: str, blocks: list[int], index: int, namespace: int) -> None:
        parts = 1 + (name in "ab")
        self.pool.add(order(name, index % parts, parts), part(*blocks, namespace=namespace))

    @rule(names=st.lists(names))
    def release(self, names: list[str]) -> None:
        self.pool.release(names)
        assert not set(names) & self.pool.warm().keys()

    @rule(blocks=blocks)
    def run(self, blocks: list[int]) -> None:
        self.pool.blocks.pin(blocks)
        self.requests.append(blocks)
        self.pool.used(blocks)

    @rule()
    def finish(self) -> None:
        if self.requests:
            self.pool.blocks.unpin(self.requests.pop(0))

    @rule(needed=st.integers(0, TOTAL))
    def make_free(self, needed: int) -> None:
        possible = self.pool.num_reclaimable()
        freed = self.pool.make_free(needed)
        assert freed >= min(needed, possible)

    @rule()
    def relieve(self) -> None:
        self.pool.relieve()
        free = self.pool.blocks.num_free_blocks()
        assert TOTAL - free <= int(self.pressure * TOTAL) or not self.pool.num_frozen

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        assert not self.pool.num_frozen

    @rule(block=st.integers(0, TOTAL - 1))
    def lose(self, block: int) -> None:
        self.pool.lost([block])
        assert block not in self.pool.block_ids

    @invariant()
    def adds_up(self) -> None:
        check_integrity(self.pool)
        held = Counter(block for blocks in self.requests for block in blocks)
        held.update(self.pool.block_ids)
        assert +self.pool.blocks.held == held
        references = self.pool.table.references()
        pool = frozen_namespaces(self.pool)
        assert {n: references[n] - 1 for n in (0, 1)} == {n: pool[n] for n in (0, 1)}


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=25)
