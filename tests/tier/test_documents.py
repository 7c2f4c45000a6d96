# SPDX-License-Identifier: Apache-2.0
"""Documents of knowledge bases in the tier of an engine: stored as soon as they are computed."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.tier.test_store import DOCUMENT, OTHER, stored
from tests.tier.world import SIZE, World
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.features.tier.deleted import Deleted
from vllm_segreuse.features.tier.record import unpacked
from vllm_segreuse.plan import Tier


def kept(world: World, tokens: list[int] = DOCUMENT, name: str = "doc") -> list[int]:
    """A document that was computed and kept, in these blocks; its orders have not left."""
    blocks = world.compute(tokens)
    world.step()
    world.tier.documents.keep(name, 0, 1, blocks)
    return blocks


def in_tier(world: World, tokens: list[int]) -> int:
    """Records of a document that can be read."""
    parts = {tuple(tokens[i : i + SIZE]) for i in range(0, len(tokens), SIZE)}
    readable = [record for record in world.catalogue if record.in_host or record.on_disk]
    return sum(tuple(record.about.tokens.tolist()) in parts for record in readable)


def on_disk(world: World, tokens: list[int]) -> list[int]:
    """First tokens of the blocks of a document that files hold."""
    assert world.files is not None
    contents = [content[0] for content in world.files.content.values()]
    return [own[0] for own, _ in contents if own[0] in tokens]


def end_of_transfers(world: World) -> None:
    for _ in range(3):
        world.step()
        if world.files is not None:
            world.files.drain_jobs()


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
    world = World(rows=6, files=True)
    stored(world, OTHER)
    kept(world)
    world.step()
    described = [world.tier.describe(record.key) for record in world.catalogue]
    assert len(described) == 6
    durable = {tuple(unpacked(it.about).tokens.tolist()) for it in described if it and it.durable}
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


def test_of_many_deleted_records_those_that_no_block_has_are_forgotten() -> None:
    names = [b"a", None, b"c"]
    deleted = Deleted(3, names.__getitem__)
    deleted.add([b"a", b"c"], step=5)
    lengths = []
    for number in range(10):
        deleted.add([b"of no block %d" % number], step=6)
        lengths.append(len(deleted))
    assert lengths == [3, 4, 5, 6, 2, 3, 4, 5, 6, 2], "twice the blocks, and no more"
    seen: list[Any] = [SimpleNamespace(key=key, born=5) for key in (b"a", b"b", b"c")]
    wanted, unwanted = deleted.split(seen)
    assert [found.key for found in wanted] == [b"b"]
    assert [found.key for found in unwanted] == [b"a", b"c"]


@pytest.mark.parametrize("step", [5, 2**32 - 2])
def test_blocks_that_are_named_later_are_new_text_and_no_others(step: int) -> None:
    """The index begins to count anew, sooner or later."""
    deleted = Deleted(3, lambda block: None)
    deleted.add([b"a"], step)
    index = SegmentIndex(1, 4)
    index.step = step
    for _ in range(4):
        seen: Any = SimpleNamespace(key=b"a", born=index.step)
        wanted, unwanted = deleted.split([seen])
        assert bool(wanted) is (index.step != step)
        assert bool(unwanted) is (index.step == step)
        index.begin_step()


# Of several blocks with one exact name.


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("zeroise", [False, True])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("part", [slice(None), slice(-1, None)])
def test_no_copy_of_a_deleted_document_in_gpu_memory_is_stored(
    files: bool, zeroise: bool, copies: int, part: slice
) -> None:
    """vLLM computes the last block of a prompt anew, whatever it has cached; two requests that
    come at once compute all of them."""
    world = World(blocks=24, rows=6, files=files, zeroise=zeroise)
    first = kept(world)
    world.step()
    others = []
    for _ in range(copies):
        others.append(world.compute(DOCUMENT)[part])
        world.step()
    end_of_transfers(world)
    world.evict(
        [
            block
            for block in world.names
            if block not in {*first, *(block for each in others for block in each)}
        ]
    )
    world.tier.documents.release(["doc"])
    end_of_transfers(world)
    stored(world, OTHER)
    stored(world, [*range(500, 512)])
    assert in_tier(world, DOCUMENT) == 0, "host memory has others now"
    for blocks in (first, *others):
        world.evict(blocks)
        end_of_transfers(world)
        assert in_tier(world, DOCUMENT) == 0
        assert world.files is None or not on_disk(world, DOCUMENT)
    assert world.match(DOCUMENT).num_tokens == 0
    world.check_idle()


def test_a_copy_that_is_computed_after_the_deletion_is_stored_beside_an_old_one() -> None:
    world = World(blocks=16, rows=6)
    old = kept(world)
    world.step()
    world.tier.documents.release(["doc"])
    world.step()
    stored(world, OTHER)
    stored(world, [*range(500, 512)])
    assert in_tier(world, DOCUMENT) == 0, "host memory has others now"
    new = world.compute(DOCUMENT)
    world.step()
    world.evict(old)
    world.step()
    assert in_tier(world, DOCUMENT) == 0
    world.evict(new)
    world.step()
    assert in_tier(world, DOCUMENT) == 3
    world.check_idle()


# What the tier could not keep, or not then.


def closed_by_an_error(world: World) -> None:
    with world.tier.health.contained("a test"):
        raise RuntimeError("closed")
    assert not world.tier.is_open


def test_a_document_that_was_never_stored_is_not_after_its_deletion() -> None:
    """Computed while the tier is closed behind a reset that has not ended: it knows its blocks."""
    world = World(blocks=16, rows=6, zeroise=True)
    others = world.compute(OTHER)
    world.step()
    world.evict(others)
    world.end_step()
    world.reset()
    blocks = world.compute(DOCUMENT)
    world.end_step()
    assert not world.tier.is_open
    world.tier.documents.keep("doc", 0, 1, blocks)
    assert world.tier.documents.held() == {}
    world.work()
    assert world.tier.is_open
    world.tier.documents.release(["doc"])
    world.step()
    world.evict(blocks)
    world.step()
    assert in_tier(world, DOCUMENT) == 0
    world.check_idle()


def test_a_block_that_is_not_indexed_keeps_the_others_of_a_deleted_document_out() -> None:
    world = World(blocks=16, rows=6)
    blocks = world.compute(DOCUMENT)
    world.step()
    world.index.remove([blocks[1]])
    world.tier.documents.keep("doc", 0, 1, blocks)
    world.tier.documents.release(["doc"])
    world.step()
    world.evict(blocks)
    world.step()
    assert in_tier(world, DOCUMENT) == 0
    world.check_idle()


@pytest.mark.parametrize("zeroise", [False, True])
def test_an_error_does_not_keep_a_deleted_document_in_memory(zeroise: bool) -> None:
    """The rows are zeroed at once, and the blocks of GPU memory are known as deleted ones."""
    world = World(blocks=16, rows=6, files=True, zeroise=zeroise)
    blocks = kept(world)
    world.step()
    assert world.files is not None
    world.step()
    world.files.drain_jobs()
    world.step()
    assert on_disk(world, DOCUMENT)
    closed_by_an_error(world)
    world.tier.documents.release(["doc"])
    assert world.region.memory.any() == (not zeroise)
    assert not on_disk(world, DOCUMENT)
    world.evict(blocks)
    world.reset()
    world.step()
    assert in_tier(world, DOCUMENT) == 0


def test_what_waits_to_be_stored_is_not_if_it_is_deleted_after_an_error() -> None:
    world = World(blocks=16, rows=6)
    world.evict(kept(world))
    closed_by_an_error(world)
    world.tier.documents.release(["doc"])
    world.tier.health.recover()
    assert world.end_step() is None
    world.work()
    assert in_tier(world, DOCUMENT) == 0
    world.check_idle()
