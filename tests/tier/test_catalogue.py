# SPDX-License-Identifier: Apache-2.0
"""Records and blocks of the pool that followed each other are linked, whoever was evicted first."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from bench.integrity import check_integrity
from tests.tier.world import SIZE, World
from vllm_segreuse.cache import index as index_module
from vllm_segreuse.cache.namespace import namespace_key
from vllm_segreuse.features.tier.record import About, Seen
from vllm_segreuse.plan import Tier

DOCUMENT = [*range(100, 112)]


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_runs_grow_whatever_order_blocks_are_evicted_in(order: tuple[int, ...]) -> None:
    world = World(rows=8)
    blocks = world.compute(DOCUMENT)
    world.step()
    for place in order:
        world.evict([blocks[place]])
        world.step()
        prompt = DOCUMENT[SIZE - 1 : 2 * SIZE + 1]  # one whole block, one token at each side
        assert world.match(prompt).num_tokens == len(prompt)
        world.check()
    assert (world.match(DOCUMENT).pieces.source == Tier.HOST).all()
    assert world.match(DOCUMENT).num_segments == 1


def test_a_block_that_is_evicted_again_hands_its_neighbours_to_its_record() -> None:
    world = World(rows=8)
    first = world.compute(DOCUMENT[:SIZE])
    world.step()
    world.evict(first)
    world.step()
    blocks = world.compute(DOCUMENT)  # its first block has a record already
    world.step()
    world.evict(blocks[:1])
    world.step()
    prompt = DOCUMENT[SIZE - 1 : 2 * SIZE]
    assert world.match(prompt).pieces.source.tolist() == [Tier.HOST, Tier.GPU]
    world.check_idle()


@pytest.mark.parametrize("taken", [False, True])
def test_a_record_does_not_follow_what_has_come_in_the_place_of_its_predecessor(
    taken: bool,
) -> None:
    """vLLM gives the block in front of it to other tokens before the record is there."""
    world = World(rows=8)
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks[2:])
    other = [*range(300, 300 + 2 * SIZE)]
    world.end_step()
    if taken:
        world.take_next(blocks[:2])
        assert world.compute(other) == blocks[:2]
    world.end_step()
    world.work()
    prompt = [*(other[SIZE:] if taken else DOCUMENT[SIZE : 2 * SIZE]), *DOCUMENT[2 * SIZE :]]
    found = world.match(prompt)
    assert found.num_tokens == len(prompt)
    assert found.num_segments == (2 if taken else 1), "these tokens never followed each other"
    world.check()


def test_records_are_removed_with_their_families() -> None:
    world = World(rows=3)
    for first in (100, 200, 300):
        blocks = world.compute([*range(first, first + 12)])
        world.step()
        world.evict(blocks)
        world.step()
        world.check_idle()
    assert len(world.catalogue) == 3
    parents = [record.about.parent for record in world.catalogue]
    assert sorted(map(bool, parents)) == [False, True, True]
    check_integrity(world.catalogue)


def test_what_the_index_has_no_room_for_is_not_found() -> None:
    world = World(rows=2)
    world.catalogue.end_entry = world.num_blocks + 1
    blocks = world.compute(DOCUMENT[:8])
    world.step()
    world.evict(blocks)
    world.step()
    assert world.match(DOCUMENT).num_tokens == SIZE
    world.check_idle()


def test_blocks_keep_their_context_when_the_one_in_front_is_stored() -> None:
    world = World(rows=8)
    blocks = world.compute(DOCUMENT)
    world.index.contexts[blocks] = contexts = np.array([11, 12, 13], np.uint64)
    world.step()
    world.evict(blocks[:1])
    world.step()
    assert world.match(DOCUMENT).num_segments == 1, "it is linked"
    assert world.index.contexts[blocks[1:]].tolist() == contexts[1:].tolist()


def names(*keys: str) -> list[bytes]:
    return [namespace_key((key,), None, None, ()) for key in keys]


def test_a_record_that_is_shown_late_is_shown_to_its_own_namespaces() -> None:
    """An id that nobody held would have been given to another namespace by then."""
    world = World(rows=4)
    world.catalogue.end_entry = world.num_blocks
    owner, second, stranger = names("owner", "second", "stranger")
    for key in (owner, second):
        blocks = world.compute(DOCUMENT[:SIZE], key=key)
        world.step()
        world.evict(blocks)
        world.step()
    [record] = world.catalogue
    assert not record.shown
    world.namespaces.intern(stranger)
    world.catalogue.end_entry = world.index.num_blocks
    world.catalogue.show([record])
    found = [world.match(DOCUMENT, key).num_tokens for key in (owner, second, stranger)]
    assert found == [SIZE, SIZE, 0]
    world.namespaces.release(world.namespaces.find(stranger) or 0)
    world.check_idle()


@pytest.mark.parametrize("is_late", [True, False])
def test_files_are_told_of_namespaces_that_are_in_use_only(is_late: bool) -> None:
    """Of many that know a record, the latest."""
    world = World(rows=4)
    if is_late:
        world.catalogue.end_entry = world.num_blocks
    keys = names(*map(str, range(66)))
    for key in keys:
        blocks = world.compute(DOCUMENT[:SIZE], key=key)
        world.step()
        world.evict(blocks)
        world.step()
    [record] = world.catalogue
    if is_late:
        world.catalogue.end_entry = world.index.num_blocks
        world.catalogue.show([record])
    told = world.catalogue.told(record)
    assert told is not None
    assert len(told) == 64
    assert {*told} <= {*keys}
    assert keys[-1] in told
    assert [world.match(DOCUMENT, key).num_tokens for key in keys] == [SIZE] * len(keys)
    world.check_idle()


def know(world: World, blocks: list[int], keys: list[bytes]) -> None:
    """Namespaces are given blocks that another has computed, as by a prefix hit."""
    for key in keys:
        namespace = world.namespaces.intern(key)
        tokens = world.index.tokens[blocks].ravel().copy()
        world.index.insert(namespace, np.asarray(blocks, np.int32), tokens, 0)
        world.namespaces.release(namespace)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_who_know_a_block_know_its_record(order: tuple[int, ...]) -> None:
    """However many they are, and wherever the block is now."""
    world = World(rows=8)
    first, *others, stranger = names(*map(str, range(300)))
    blocks = world.compute(DOCUMENT, key=first)
    know(world, blocks, others)
    half = names("half")[0]
    know(world, blocks[:2], [half])
    world.step()
    for place in order:
        world.evict([blocks[place]])
        assert world.match(DOCUMENT, stranger).num_tokens == 0
        world.step()
        world.check()
    for key in (first, others[0], others[150], others[-1], first):
        found = world.match(DOCUMENT, key)
        assert (found.num_tokens, found.num_segments) == (len(DOCUMENT), 1)
        assert (found.pieces.source == Tier.HOST).all()
    assert world.match(DOCUMENT, half).num_tokens == 2 * SIZE
    assert world.match(DOCUMENT, stranger).num_tokens == 0
    world.check_idle()
    # Computed once more elsewhere, known to more, and evicted again: two become one.
    blocks = world.compute(DOCUMENT, key=stranger)
    later = names(*(f"later {n}" for n in range(100)))
    know(world, blocks, later)
    world.step()
    world.evict(blocks)
    world.step()
    for key in (others[0], later[50], stranger, later[-1], first):
        assert world.match(DOCUMENT, key).num_tokens == len(DOCUMENT)
    assert world.match(DOCUMENT, half).num_tokens == 2 * SIZE
    world.check_idle()
    assert not world.index.known.num_detached


def test_who_gets_the_id_of_a_namespace_gets_nothing_else_of_it(monkeypatch) -> None:
    """What it knew was taken back, while a record has its id still."""
    world = World(rows=8)
    first, gone, other, stranger = names("first", "gone", "other", "stranger")
    blocks = world.compute(DOCUMENT, key=first)
    know(world, blocks, [gone])
    world.step()
    world.evict(blocks)
    world.step()
    records = [*world.catalogue]
    assert all(gone in world.catalogue.told(record) for record in records)
    namespace = world.namespaces.find(gone)
    monkeypatch.setattr(index_module, "MAX_KNOWN_PREFIXES", 1)
    more = world.compute([*range(500, 508)], key=first)
    know(world, more, [other])
    held = [world.namespaces.intern(key) for key in (*names("1", "2", "3"), stranger)]
    assert namespace in held
    for record in records:
        world.catalogue.adopt(record, ())
        world.catalogue.see_again(record, Seen(record.key, About(record.about.tokens, 0, 0, None)))
        assert world.catalogue.told(record) == [first]
    for key in (*names("1", "2", "3"), stranger):
        assert world.match(DOCUMENT, key).num_tokens == 0


def test_what_is_not_stored_is_known_to_nobody() -> None:
    """A block that had other KV by the time it was to be stored, or no row."""
    world = World(rows=1)
    blocks = world.compute(DOCUMENT)
    keys = names(*map(str, range(50)))
    know(world, blocks, keys)
    world.step()
    world.evict(blocks)
    world.step(fails=True)
    assert [world.match(DOCUMENT, key).num_tokens for key in keys] == [0] * len(keys)
    assert not world.index.known.num_detached
    world.check_idle()
    for key in keys:
        namespace = world.namespaces.intern(key)
        world.namespaces.release(namespace)
    assert world.index.known.num_cells == 0


def test_who_waits_for_a_record_keeps_its_id() -> None:
    """Another namespace would learn of what it knew."""
    world = World(rows=4)
    blocks = world.compute(DOCUMENT[:SIZE])
    knows, stranger = names("knows", "stranger")
    know(world, blocks, [knows])
    world.step()
    world.evict(blocks)
    namespace = world.namespaces.find(knows)
    assert namespace is not None
    for n in range(200):
        other = world.namespaces.intern(str(n).encode())
        assert other != namespace
        world.namespaces.release(other)
    world.step()
    assert world.match(DOCUMENT, knows).num_tokens == SIZE
    assert world.match(DOCUMENT, stranger).num_tokens == 0
    world.check_idle()
