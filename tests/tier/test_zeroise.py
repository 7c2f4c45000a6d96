# SPDX-License-Identifier: Apache-2.0
"""With `tier.zeroise` nothing of a record stays in memory that it has left, and nothing is zeroed
that somebody still reads or writes."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from tests.store.records import key_of
from tests.tier.test_documents import kept
from tests.tier.test_mover import CELL_BYTES, CPU, Streams, copier, pages_of, region, stored_as
from tests.tier.test_scheduler_side import Tiered
from tests.tier.test_store import DOCUMENT, OTHER, stored
from tests.tier.world import SIZE, World
from vllm_segreuse.features.tier import copying as worker
from vllm_segreuse.features.tier.files import open_files
from vllm_segreuse.features.tier.host_rows import HostRows
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.features.tier.region import HostRegion, RegionShape
from vllm_segreuse.features.tier.staging import StagedMover


def filled(world: World) -> list[int]:
    """Rows that hold something."""
    found: list[int] = world.region.memory.any(axis=1).nonzero()[0].tolist()
    return found


def sent(world: World) -> None:
    """A document is stored, and a plan that reads it is with the ranks."""
    stored(world)
    pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    world.send("a", DOCUMENT, pieces)


# Rows.


@pytest.mark.parametrize("zeroise", [False, True])
def test_a_row_that_is_replaced_is_zeroed_before_the_next_record_is_there(zeroise: bool) -> None:
    world = World(rows=3, zeroise=zeroise)
    stored(world)
    assert len(filled(world)) == 3
    blocks = world.compute(OTHER)
    world.step()
    world.evict(blocks)
    orders = world.end_step()
    assert orders is not None
    assert len(orders.rows) == 3
    assert len(filled(world)) == (0 if zeroise else 3), "no worker has written anything yet"
    world.work()
    assert len(filled(world)) == 3
    world.check_idle()


def test_what_could_not_be_copied_as_a_whole_leaves_nothing() -> None:
    world = World(rows=3, zeroise=True)
    blocks = world.compute(DOCUMENT)
    world.step()
    world.evict(blocks)
    world.end_step()
    world.work(fails=True)
    assert filled(world) == []
    world.check_idle()


def test_what_files_could_not_be_read_into_leaves_nothing() -> None:
    world = World(rows=3, files=True, zeroise=True)
    for tokens in (DOCUMENT, OTHER):
        stored(world, tokens)
        world.step()
        assert world.files is not None
        while world.files.jobs:
            world.files.work()
        world.step()
    assert world.hold("a", DOCUMENT) is None
    world.step()
    world.files.work(fails=True)
    assert len(filled(world)) == 3
    world.step()
    world.tier.left("a")
    assert filled(world) == []
    world.check_idle()


# Deleted documents.


@pytest.mark.parametrize("zeroise", [False, True])
def test_a_deleted_document_leaves_host_memory_at_once(zeroise: bool) -> None:
    world = World(rows=6, zeroise=zeroise)
    stored(world, OTHER)
    blocks = kept(world)
    world.step()
    world.evict(blocks)
    world.step()
    assert len(filled(world)) == 6
    world.tier.documents.release(["doc"])
    assert len(filled(world)) == (3 if zeroise else 6)
    assert world.match(DOCUMENT).num_tokens == (0 if zeroise else len(DOCUMENT))
    assert world.match(OTHER).num_tokens == len(OTHER)
    assert not world.tier.has_pending_work
    world.check_idle()


def test_records_that_another_document_has_stay() -> None:
    world = World(rows=6, zeroise=True)
    blocks = kept(world)
    world.tier.documents.keep("twin", 0, 1, blocks)
    world.step()
    world.tier.documents.release(["doc"])
    assert len(filled(world)) == 3
    assert world.tier.documents.held() == {"twin": "host"}


def test_what_a_plan_reads_is_zeroed_once_all_ranks_have_read_it() -> None:
    world = World(rows=3, ranks=2, zeroise=True)
    world.evict(kept(world))
    world.step()
    pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    world.tier.documents.release(["doc"])
    assert len(filled(world)) == 3
    world.send("a", DOCUMENT, pieces)
    world.end_step()
    first, second = world.ranks
    while first.steps:
        first.run()
    world.tier.note(first.report())
    world.end_step()
    assert len(filled(world)) == 3, "the second rank has not read it"
    assert world.tier.has_pending_work
    while second.steps:
        second.run()
    world.tier.note(second.report())
    assert second.read == 3
    assert world.tier.has_pending_work
    world.step()
    assert filled(world) == []
    assert not world.tier.has_pending_work
    world.check_idle()


def test_what_is_deleted_while_it_is_stored_is_zeroed_and_never_written_to_a_file() -> None:
    world = World(rows=3, files=True, zeroise=True)
    kept(world)
    world.end_step()
    world.tier.documents.release(["doc"])
    (key, *_) = [found.key for found in world.catalogue]
    assert world.tier.describe(key) is None
    world.work()
    assert len(filled(world)) == 3, "files may read it"
    assert world.tier.describe(key) is None
    assert world.files is not None
    world.step()
    assert len(filled(world)) == 3, "the transfer is not over"
    while world.files.jobs:
        world.files.work()
    world.step()
    assert filled(world) == []
    world.check_idle()


def test_a_document_that_comes_back_while_it_is_read_stays() -> None:
    world = World(rows=3, zeroise=True)
    world.evict(kept(world))
    world.step()
    pieces = world.hold("a", DOCUMENT)
    assert pieces is not None
    world.tier.documents.release(["doc"])
    kept(world)
    world.send("a", DOCUMENT, pieces)
    world.step()
    world.step()
    assert len(filled(world)) == 3
    assert world.tier.documents.held() == {"doc": "host"}
    world.check_idle()


# Reset and the end.


@pytest.mark.parametrize("zeroise", [False, True])
def test_a_reset_zeroes_all(zeroise: bool) -> None:
    world = World(rows=6, zeroise=zeroise)
    stored(world)
    world.reset()
    assert len(filled(world)) == (0 if zeroise else 3)


def test_a_reset_zeroes_what_is_in_flight_once_all_ranks_are_done() -> None:
    world = World(rows=6, ranks=2, zeroise=True)
    sent(world)
    world.evict(world.compute(OTHER))
    world.end_step()
    world.reset()
    first, second = world.ranks
    first.run()
    world.tier.note(first.report())
    assert len(filled(world)) >= 3, "the second rank has not read it"
    assert not world.tier.is_open
    second.run()
    world.tier.note(second.report())
    assert second.read == 3
    assert filled(world) == []
    assert world.tier.is_open
    world.check_idle()


def test_two_resets_in_a_row_zero_what_the_first_has_left() -> None:
    world = World(rows=6, ranks=2, zeroise=True)
    sent(world)
    world.end_step()
    world.reset()
    world.reset()
    assert len(filled(world)) == 3
    world.work()
    assert filled(world) == []


@pytest.mark.parametrize("zeroise", [False, True])
def test_the_end_of_an_engine_zeroes_the_region(zeroise: bool) -> None:
    shape = RegionShape(rows=20, cell_bytes=4096, ranks=1)
    name = f"test_{uuid.uuid4().hex}"
    worker = HostRegion(name, shape, 0)
    rows = HostRows(HostRegion(name, shape, None), zeroise)
    context = ReqContext("a")
    keys = [OffloadKey(key_of(number)) for number in range(7)]
    assert rows.prepare_store(keys, context) is not None
    cells = worker.cells()
    cells[:7] = 1
    rows.complete_store(keys, context)
    rows.shutdown()
    assert cells.any().item() is not zeroise
    del cells
    worker.cleanup()


def test_the_option_reaches_rows_and_files(tmp_path: Path) -> None:
    world = Tiered(files={"zeroise": True})
    world.run(world.add(DOCUMENT))
    world.end_step()
    world.report(world.evict_all())
    memory = world.region.memory
    memory[: len(DOCUMENT) // SIZE] = 1
    world.side.close()
    assert not memory.any()
    for zeroise in (False, True):
        options = TierOptions(path=str(tmp_path), disk_gib=1, zeroise=zeroise)
        tier = open_files(options, memoryview(memory), bytes(32), lambda key: None)
        assert tier.zeroises is zeroise
        tier.shutdown()


# Buffers on the way.


@pytest.mark.parametrize("zeroises", [False, True])
def test_staging_on_the_device_is_zeroed_behind_each_use(zeroises: bool) -> None:
    pages = pages_of(torch.bfloat16)
    cells, _ = region(pages)
    streams = Streams()
    staged = StagedMover(
        *(copier(pages), stored_as(pages), CPU, cells, streams),
        staging_bytes=4 * CELL_BYTES,
        zeroises=zeroises,
    )

    def holds() -> bool:
        return any(half.any().item() for half in staged.staging)

    for half in staged.staging:
        half.zero_()
    staged.store(np.arange(5), np.arange(5))
    assert cells[:5].any(dim=1).all()
    assert holds() is not zeroises
    for half in staged.staging:
        half.zero_()
    for loaded in staged.load(np.arange(5)):
        for page, layer in zip(loaded.pages, pages, strict=True):
            got = page[torch.from_numpy(loaded.slots)]
            assert torch.equal(got, layer[loaded.first : loaded.stop]), "it is read before"
    assert holds() is not zeroises


@pytest.mark.parametrize("zeroises", [False, True])
def test_the_option_reaches_staging(monkeypatch: pytest.MonkeyPatch, zeroises: bool) -> None:
    monkeypatch.setattr(worker, "GpuStreams", lambda device: Streams())
    monkeypatch.setattr(worker, "pin_mmap_region", lambda region: None)
    stored_pages = stored_as(pages_of(torch.bfloat16))
    cells = torch.zeros(4, CELL_BYTES, dtype=torch.int8)
    host: Any = SimpleNamespace(cells=lambda: cells, views=lambda stored: [])
    copy: Any = None
    mover = worker.mover_for(host, copy, stored_pages, torch.device("meta"), zeroises=zeroises)
    assert isinstance(mover, StagedMover)
    assert mover.zeroises is zeroises
