# SPDX-License-Identifier: Apache-2.0
"""Documents of knowledge bases in the tier of an engine: stored as soon as they are computed."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.tier.test_store import DOCUMENT, OTHER, stored
from tests.tier.world import World
from vllm_segreuse.plan import Tier
from vllm_segreuse.tier.deleted import Deleted


def kept(world: World, tokens: list[int] = DOCUMENT, name: str = "doc") -> list[int]:
    """A document that was computed and kept, in these blocks; its orders have not left."""
    blocks = world.compute(tokens)
    world.step()
    world.tier.documents.keep(name, 0, 1, blocks)
    return blocks


def test_documents_may_take_what_host_memory_or_the_files_hold() -> None:
    """Whatever the bytes of the budget are: a record takes more of the disk than its row."""
    options: dict[str, Any] = {"path": "tier", "disk_gib": 1}
    world = World(rows=4, files=True, most_files=9, **options)
    assert world.tier.documents.capacity_blocks == 9
    world = World(rows=4, files=True, most_files=2, **options)
    assert world.tier.documents.capacity_blocks == 4
    assert World(rows=4).tier.documents.capacity_blocks == 4


@pytest.mark.parametrize("admission", ["evicted", "knowledge"])
def test_a_document_is_stored_while_it_is_in_gpu_memory(admission: str) -> None:
    world = World(admission=admission)
    blocks = kept(world)
    assert world.tier.documents.held() == {}
    orders = world.end_step()
    assert orders is not None
    assert sorted(orders.blocks) == sorted(blocks)
    assert world.tier.documents.held() == {}, "not before all workers have stored it"
    world.work()
    assert world.tier.documents.held() == {"doc": "host"}
    world.check_idle()
    world.evict(blocks)
    world.step()
    found = world.match([7, *DOCUMENT, 8])
    assert found.num_tokens == len(DOCUMENT)
    assert (found.pieces.source == Tier.HOST).all()


def test_a_document_that_host_memory_loses_is_not_held_and_is_once_it_is_stored_again() -> None:
    world = World(rows=4)
    kept(world)
    world.step()
    stored(world, OTHER)
    assert world.tier.documents.held() == {}
    kept(world)
    world.step()
    assert world.tier.documents.held() == {"doc": "host"}
    world.check_idle()


def test_a_store_that_fails_leaves_nothing_held() -> None:
    world = World()
    kept(world)
    world.step(fails=True)
    assert world.tier.documents.held() == {}
    kept(world)
    world.step()
    assert world.tier.documents.held() == {"doc": "host"}


@pytest.mark.parametrize("why", ["full", "failed"])
def test_a_document_that_could_not_be_stored_is_lost_until_it_is(why: str) -> None:
    world = World(rows=3)
    if why == "full":
        stored(world)
        pieces = world.hold("a", DOCUMENT)  # all rows are read
        assert pieces is not None
    kept(world, OTHER)
    assert world.tier.documents.lost() == []
    world.step(fails=why == "failed")
    assert world.tier.documents.lost() == ["doc"]
    world.tier.left("a")
    kept(world, OTHER)
    world.step()
    assert world.tier.documents.held() == {"doc": "host"}
    assert world.tier.documents.lost() == []
    world.check_idle()


@pytest.mark.parametrize("end", ["release", "reset"])
def test_a_lost_document_that_is_gone_is_not_wanted(end: str) -> None:
    world = World()
    kept(world)
    world.step(fails=True)
    assert world.tier.documents.lost() == ["doc"]
    if end == "release":
        world.tier.documents.release(["doc"])
    else:
        world.tier.reset()
    assert world.tier.documents.lost() == []


def test_what_was_evicted_and_stored_before_is_held_at_once() -> None:
    world = World()
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks)
    world.step()
    kept(world)
    assert world.tier.documents.held() == {"doc": "host"}
    assert world.end_step() is None, "it is not copied again"


def test_a_block_that_is_not_indexed_is_not_kept() -> None:
    world = World()
    blocks = world.compute(DOCUMENT)
    world.step()
    world.index.remove([blocks[1]])
    world.tier.documents.keep("doc", 0, 1, blocks)
    world.step()
    assert world.tier.documents.held() == {}
    world.check_idle()


def test_a_plan_that_reads_a_document_uses_it() -> None:
    world = World()
    blocks = kept(world)
    world.step()
    world.evict(blocks)
    world.step()
    for request in "ab":
        pieces = world.hold(request, DOCUMENT)
        assert pieces is not None
        world.send(request, DOCUMENT, pieces)
        world.step()
    uses = world.tier.documents.take_uses()
    assert [(name, use.hits) for name, use in uses.items()] == [("doc", 2)]
    world.check_idle()


def test_nothing_is_held_after_a_reset() -> None:
    world = World()
    kept(world)
    world.step()
    world.reset()
    assert world.tier.documents.held() == {}
    kept(world)
    world.step()
    assert world.tier.documents.held() == {"doc": "host"}
    world.tier.documents.release(["doc"])
    assert world.tier.documents.held() == {}


def test_files_know_which_records_are_durable() -> None:
    world = World(rows=6)
    stored(world, OTHER)
    kept(world)
    world.step()
    described = [world.tier.describe(record.key) for record in world.catalogue]
    assert len(described) == 6
    durable = {tuple(r.tokens.tolist()) for r in described if r is not None and r.durable}
    assert durable == {tuple(DOCUMENT[i : i + 4]) for i in (0, 4, 8)}
    assert world.tier.describe(b"unknown") is None


@pytest.mark.parametrize("files", [False, True])
def test_what_is_left_of_a_deleted_document_in_gpu_memory_is_not_stored_again(files: bool) -> None:
    world = World(rows=6, files=files, zeroise=True)
    blocks = kept(world)
    world.step()
    world.tier.documents.release(["doc"])
    for _ in range(2):
        world.step()
        if world.files is not None:
            world.files.drain_jobs()
    world.evict(blocks)
    world.step()
    assert world.match(DOCUMENT).num_tokens == 0
    assert (world.tier.counts().host, world.tier.counts().disk) == (0, 0)
    stored(world)
    assert world.match(DOCUMENT).num_tokens == len(DOCUMENT), "computed again, it is new text"
    if world.files is not None:
        world.files.drain_jobs()
        world.step()
    world.check_idle()


def test_what_is_evicted_and_deleted_in_one_step_is_not_stored() -> None:
    world = World(rows=6)
    world.evict(kept(world))
    world.tier.documents.release(["doc"])
    assert world.end_step() is None
    world.work()
    assert world.match(DOCUMENT).num_tokens == 0
    world.check_idle()


def test_a_deleted_document_that_is_kept_again_is_stored() -> None:
    world = World(rows=6)
    blocks = kept(world)
    world.tier.documents.release(["doc"])
    world.tier.documents.keep("doc", 0, 1, blocks)
    world.step()
    assert world.tier.documents.held() == {"doc": "host"}
    world.check_idle()


def test_a_deleted_document_that_is_kept_again_is_stored_when_it_is_evicted() -> None:
    world = World(rows=3)
    blocks = kept(world)
    world.step()
    world.tier.documents.release(["doc"])
    world.tier.documents.keep("doc", 0, 1, blocks)
    world.step()
    stored(world, OTHER)
    assert world.tier.documents.held() == {}, "host memory has lost it"
    world.evict(blocks)
    world.step()
    assert world.tier.documents.held() == {"doc": "host"}
    world.check_idle()


def test_after_a_reset_the_text_of_a_deleted_document_is_stored_as_any_other() -> None:
    world = World(rows=6)
    kept(world)
    world.step()
    world.tier.documents.release(["doc"])
    world.reset()
    stored(world)
    assert world.match(DOCUMENT).num_tokens == len(DOCUMENT)
    world.check_idle()


def test_of_many_deleted_records_the_oldest_are_forgotten() -> None:
    deleted = Deleted(2)
    deleted.add([b"a", b"b"])
    deleted.add([b"a", b"c"])
    assert len(deleted) == 2
    seen: list[Any] = [SimpleNamespace(key=key) for key in (b"a", b"b", b"c")]
    wanted, unwanted = deleted.split(seen, evicted=True)
    assert ([found.key for found in wanted], len(unwanted)) == ([b"b"], 2)
    assert not len(deleted)
