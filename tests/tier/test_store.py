# SPDX-License-Identifier: Apache-2.0
"""Evicted blocks are stored, found and read; nothing is read that is not there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.tier.world import NAMESPACE, SIZE, World
from vllm_segreuse.cache.namespace import namespace_key
from vllm_segreuse.features.tier.record import namespaces_of, unpacked
from vllm_segreuse.plan import Tier, TierDone

DOCUMENT = [*range(100, 112)]  # three blocks
OTHER = [*range(200, 212)]


def stored(world: World, tokens: list[int] = DOCUMENT) -> list[int]:
    """A document that was evicted and stored; the blocks that it was in."""
    blocks = world.compute(tokens)
    world.step()
    world.evict(blocks)
    world.step()
    return blocks


def test_an_evicted_document_is_found_in_host_memory() -> None:
    world = World()
    blocks = world.compute(DOCUMENT)
    world.step()
    assert (world.match(DOCUMENT).pieces.source == Tier.GPU).all()
    world.evict(blocks)
    assert not len(world.match(DOCUMENT).pieces), "not before all workers have stored it"
    orders = world.end_step()
    assert orders is not None
    assert sorted(orders.blocks) == sorted(blocks)
    assert not len(world.match(DOCUMENT).pieces)
    world.work()
    found = world.match([7, *DOCUMENT, 8])
    assert (found.num_tokens, found.num_segments) == (len(DOCUMENT), 1)
    assert (found.pieces.source == Tier.HOST).all()
    assert found.pieces.donor_blocks == []
    assert found.pieces.num_tiered == len(DOCUMENT)
    world.check_idle()


def test_rows_are_held_until_all_ranks_have_read_them() -> None:
    world = World(rows=3, ranks=2)
    stored(world)
    pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    assert len(pieces) == 3
    world.send("a", DOCUMENT, pieces)
    world.tier.left("a")  # the request may end before
    blocks = world.compute(OTHER)
    orders = world.end_step()
    assert orders is not None
    assert not len(orders.rows)
    world.evict(blocks)
    orders = world.end_step()
    assert orders is None, "no row is free, so nothing is stored"
    assert world.stats.data["tier_dropped_total"] == {"full": 3}
    for rank in world.ranks:
        assert world.tier.counts().holds == 1
        rank.run()
        world.tier.note(rank.report())
    assert [rank.read for rank in world.ranks] == [3, 3]
    world.work()
    world.check_idle()


def test_a_plan_that_is_not_carried_out_holds_nothing() -> None:
    world = World()
    stored(world)
    assert world.hold("a", DOCUMENT) is not None
    assert world.tier.counts().holds == 1
    world.tier.let_go("a")
    world.check_idle()


def test_the_least_recently_used_record_is_replaced_and_no_longer_found() -> None:
    world = World(rows=4)
    stored(world)
    pieces = world.hold("a", DOCUMENT[:SIZE])
    assert pieces is not None
    world.send("a", DOCUMENT[:SIZE], pieces)
    world.step()
    stored(world, OTHER)
    assert world.match(OTHER).num_tokens == len(OTHER)
    assert world.match(DOCUMENT).num_tokens == SIZE, "the block that was read is the newest"
    world.check_idle()


def test_what_could_not_be_copied_is_not_found() -> None:
    world = World(ranks=2)
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks)
    world.step(fails=True)
    assert not len(world.match(DOCUMENT).pieces)
    assert world.stats.data["tier_dropped_total"] == {"failed": 3}
    assert not world.chunks
    world.check_idle()
    stored(world)
    assert world.match(DOCUMENT).num_tokens == len(DOCUMENT)


def test_equal_exact_blocks_are_stored_once_and_approximate_ones_each() -> None:
    world = World(rows=8)
    stored(world)
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks)
    assert world.step() is None, "its records are there"
    assert len(world.catalogue) == 3
    blocks = world.compute(DOCUMENT, depth=1)
    world.step()
    world.evict(blocks)
    orders = world.step()
    assert orders is not None
    assert len(orders.rows) == 3
    assert len(world.catalogue) == 6
    world.check_idle()


def test_short_runs_are_not_loaded() -> None:
    world = World(min_run_tokens=8)
    stored(world)
    assert world.match(DOCUMENT[:7]).num_tokens == 0
    assert world.match(DOCUMENT[:8]).num_tokens == 8
    found = world.match([*DOCUMENT[:7], 0, *DOCUMENT[:8]])
    assert (found.num_tokens, found.num_segments) == (8, 1)


def test_runs_grow_over_records_and_blocks_of_the_pool() -> None:
    world = World(rows=8)
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks[1:2])
    world.step()
    prompt = DOCUMENT[2:10]  # one block is whole, and parts of both neighbours
    found = world.match(prompt)
    assert found.num_tokens == len(prompt)
    assert found.pieces.source.tolist() == [Tier.GPU, Tier.HOST, Tier.GPU]
    world.evict(blocks[:1])
    world.step()
    assert world.match(prompt).pieces.source.tolist() == [Tier.HOST, Tier.HOST, Tier.GPU]
    world.evict(blocks[2:])
    world.step()
    assert world.match(prompt).pieces.source.tolist() == [Tier.HOST] * 3
    world.check_idle()


def test_namespaces_stay_apart_and_all_that_knew_a_block_find_its_record() -> None:
    world = World()
    other = namespace_key(("mail",), None, None, ())
    blocks = world.compute(DOCUMENT)
    for namespace in (NAMESPACE, other):
        number = world.namespaces.intern(namespace)
        world.index.insert(number, *_known(world, blocks))
        world.namespaces.release(number)
    world.step()
    world.evict(blocks)
    world.step()
    for namespace, tokens in ((NAMESPACE, 12), (other, 12), (b"third", 0)):
        assert world.match(DOCUMENT, namespace).num_tokens == tokens
    world.check_idle()


def _known(world: World, blocks: list[int]) -> tuple:
    import numpy as np

    return np.asarray(blocks, np.int32), np.asarray(DOCUMENT, np.int32), 0


def test_a_namespace_is_not_forgotten_while_its_blocks_are_being_stored() -> None:
    world = World()
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks)
    before = world.namespaces.find(NAMESPACE)
    assert world.index.population(before or 0) == 0
    other = world.namespaces.intern(b"other")
    assert other != before
    world.step()
    assert world.match(DOCUMENT).num_tokens == len(DOCUMENT)
    assert world.match(DOCUMENT, b"other").num_tokens == 0
    world.namespaces.release(other)
    world.check_idle()


def test_a_reset_forgets_all_and_waits_for_what_is_under_way() -> None:
    world = World(ranks=2)
    stored(world)
    pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    world.send("a", DOCUMENT, pieces)
    world.end_step()
    assert world.hold("b", DOCUMENT) is not None
    world.reset()
    assert not len(world.match(DOCUMENT).pieces)
    world.ranks[0].run()
    world.tier.note(world.ranks[0].report())
    blocks = world.compute(OTHER)
    world.end_step()
    world.evict(blocks)
    assert world.end_step() is None, "a worker still reads rows of before"
    world.work()
    stored(world, OTHER)
    assert world.match(OTHER).num_tokens == len(OTHER)
    world.check_idle()


def test_an_error_ends_the_tier_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    stored(world)

    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(world.manager, "prepare_load", fail)
        pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    assert not len(pieces), "it is computed"
    assert not world.tier.is_open
    assert world.step() is None
    world.reset()
    stored(world)
    assert world.match(DOCUMENT).num_tokens == len(DOCUMENT)
    world.check_idle()


@pytest.mark.parametrize(
    ("place", "calls", "method"),
    [
        ("namespaces", 0, "release"),  # of the first record
        ("namespaces", 2, "release"),  # of the last
        ("index", 0, "insert"),
        ("manager", 0, "prepare_store"),
        ("manager", 0, "complete_store"),
        ("catalogue", 1, "add"),
    ],
)
def test_a_reset_after_an_error_gives_back_each_namespace_once(
    place: str, calls: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    running = world.namespaces.intern(NAMESPACE)  # of a request
    blocks = world.compute(DOCUMENT)
    world.step()
    inner, before = getattr(getattr(world, place), method), iter(range(calls))

    def fail(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        if next(before, None) is None:
            raise RuntimeError("broken")
        return result

    with monkeypatch.context() as patched:
        patched.setattr(getattr(world, place), method, fail)
        world.evict(blocks)
        world.step()
    assert not world.tier.is_open
    world.reset()
    assert world.tier.is_open
    assert world.namespaces.find(NAMESPACE) == running
    assert world.namespaces.num_references == 1, "the running request's"
    world.namespaces.release(running)
    stored(world)
    assert world.match(DOCUMENT).num_tokens == len(DOCUMENT)
    world.check_idle()


def test_nothing_is_stored_once_the_index_is_not_to_be_believed() -> None:
    world = World()
    blocks = world.compute(DOCUMENT)
    world.step()
    world.health.broken = True
    world.evict(blocks)
    assert world.step() is None
    assert not len(world.catalogue)


def test_a_block_without_kv_is_not_stored() -> None:
    world = World()
    world.evict(world.compute(DOCUMENT))
    assert world.step() is None


def test_with_knowledge_only_nothing_that_is_evicted_is_stored() -> None:
    world = World(admission="knowledge")
    stored(world)
    assert not len(world.catalogue)


# Files.


def on_disk(world: World) -> None:
    """All that is in host memory is written to files."""
    assert world.files is not None
    while world.files.jobs:
        world.files.work()
    world.step()


def test_what_leaves_host_memory_is_read_from_files() -> None:
    world = World(rows=3, files=True, wait_ms=5000)
    stored(world)
    on_disk(world)
    stored(world, OTHER)
    on_disk(world)
    counts = world.tier.counts()
    assert (counts.host, counts.disk) == (3, 6)
    assert world.files is not None
    assert world.hold("a", DOCUMENT) is None, "it is on its way"
    world.step()
    assert world.hold("a", DOCUMENT) is None
    world.now_s += 1
    world.files.work()
    world.step()
    pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    assert pieces.num_tiered == len(DOCUMENT)
    world.now_s += 300  # no blocks are free
    world.send("a", DOCUMENT, pieces)
    world.step()
    assert world.ranks[0].read == 3
    assert world.stats.data["tier_wait_seconds"] == [1]
    world.check_idle()


def test_nobody_waits_longer_for_files_than_allowed() -> None:
    world = World(rows=3, files=True, wait_ms=50)
    stored(world)
    on_disk(world)
    stored(world, OTHER)
    on_disk(world)
    assert world.hold("a", DOCUMENT) is None
    world.step()
    world.now_s += 0.05
    pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    assert not len(pieces)
    assert world.stats.data["tier_wait_seconds"] == [0.05], "its wait is over"
    assert world.tier.counts().jobs == 0
    world.tier.let_go("a")
    world.now_s += 300  # it is computed, and decodes
    assert world.hold("a", DOCUMENT) is not None, "it has waited"
    world.tier.left("a")
    assert world.stats.data["tier_wait_seconds"] == [0.05]
    assert world.hold("a", DOCUMENT) is None, "another request of this name"
    world.tier.left("a")
    on_disk(world)
    world.step()
    world.check_idle()


def test_two_plans_that_do_not_fit_together_never_hold_rows_while_they_wait() -> None:
    """Each would otherwise have a part of the host tier, and wait for the other's."""
    world = World(rows=4, files=True)
    plans = {"a": DOCUMENT, "b": OTHER}
    for tokens in plans.values():
        stored(world, tokens)
        on_disk(world)
    stored(world, [*range(300, 316)])  # all four rows are others' now
    on_disk(world)
    waiting = dict(plans)
    for _ in range(12):
        for request, tokens in list(waiting.items()):
            pieces = world.hold(request, tokens)
            if pieces is None:
                assert request not in world.tier.loads, "it waits and holds"
                continue
            assert pieces.num_tiered == len(tokens), "no time has passed"
            world.send(request, tokens, pieces)
            world.tier.left(request)
            del waiting[request]
        on_disk(world)
    assert not waiting
    assert world.ranks[0].read == 6
    world.check_idle()


def test_a_file_that_is_lost_is_not_waited_for() -> None:
    world = World(rows=3, files=True)
    stored(world)
    on_disk(world)
    stored(world, OTHER)
    on_disk(world)
    assert world.files is not None
    for key in list(world.files.content):
        del world.files.content[key]  # and nobody says so
    pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    assert not len(pieces)
    world.tier.left("a")


def test_a_record_that_both_have_lost_leaves_the_index() -> None:
    world = World(rows=3, files=True, most_files=3)
    stored(world)
    on_disk(world)
    stored(world, OTHER)
    on_disk(world)
    assert world.match(DOCUMENT).num_tokens == 0
    assert world.match(OTHER).num_tokens == len(OTHER)
    world.check_idle()


def test_records_of_lora_requests_are_not_written_to_files() -> None:
    world = World(rows=6, files=True)
    lora = namespace_key(("docs",), None, ("adapter", "1"), ())
    blocks = world.compute(DOCUMENT, key=lora)
    keys = [world.key_of(block) for block in blocks]
    world.step()
    world.evict(blocks)
    world.step()
    blocks = world.compute(OTHER)
    own = [world.key_of(block) for block in blocks]
    world.step()
    world.evict(blocks)
    world.step()
    assert [world.tier.describe(key) for key in keys if key] == [None] * 3
    described = [it for key in own if key and (it := world.tier.describe(key))]
    assert [it.key for it in described] == own
    assert [unpacked(it.about).position for it in described] == [0, 4, 8]
    assert [unpacked(it.about).parent for it in described] == [None, own[0], own[1]]
    assert world.files is not None
    digest = world.files.digest(NAMESPACE)
    assert [namespaces_of(it.about) for it in described] == [[digest]] * 3


def test_what_the_codec_cannot_store_on_any_rank_is_never_read() -> None:
    world = World(rows=4, ranks=2)
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks)
    orders = world.end_step()
    assert orders is not None
    place = orders.blocks.tolist().index(blocks[1])
    for rank in world.ranks:
        rank.run()
        done = rank.report()
        if rank.number == 1:
            done.without_code = {(orders.sequence, place)}
        world.tier.note(done)
    assert world.stats.data["tier_dropped_total"] == {"codec": 1}
    found = world.match(DOCUMENT)
    assert found.num_tokens == 2 * SIZE
    assert SIZE not in found.pieces.destination
    assert world.tier.counts().host == 2
    world.check_idle()
    assert len(stored(world, OTHER)) == 3, "its row is free again"
    world.check_idle()


def test_a_step_of_which_nothing_can_be_stored_leaves_nothing() -> None:
    world = World()
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks)
    orders = world.end_step()
    assert orders is not None
    [rank] = world.ranks
    rank.run()
    done = rank.report()
    done.without_code = {(orders.sequence, place) for place in range(3)}
    world.tier.note(done)
    assert world.tier.counts().host == 0
    world.check_idle()


def test_files_are_read_after_a_reset_once_all_ranks_have_the_weights_of_the_start() -> None:
    world = World(ranks=2, files=True)
    assert world.files is not None
    for others in ([True, False], [False, True], [False, False]):
        world.reset()
        orders = world.tier.take_orders()
        assert orders is not None
        assert orders.verify
        for other in others:
            assert world.files.hidden
            done = TierDone(Counter({orders.sequence: 1}))
            done.other_weights = {orders.sequence} if other else set()
            world.tier.note(done)
        assert world.files.hidden == any(others)
