# SPDX-License-Identifier: Apache-2.0
"""What was stored in files is found by the next engine, in its own namespace only."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from segreuse_store import FileStore, record_bytes
from segreuse_store.disk import Disk
from segreuse_store.file_store import PAUSES_S
from tests.parts import parts_of
from tests.store.records import Hang, raises
from tests.test_scheduler import DOCUMENT, OPTIONS, PROMPT
from tests.tier.fakes import ROW_BYTES, Region
from tests.tier.test_scheduler_side import Tiered
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.features.knowledge.kept import Place
from vllm_segreuse.features.tier import start
from vllm_segreuse.features.tier.files import open_files
from vllm_segreuse.features.tier.options import TierOptions

OTHER = OPTIONS | {"extra_keys": "others"}


def wait_for(world: Tiered, records: int) -> None:
    """Until so many records are on disk."""
    for _ in range(1000):
        world.report(world.end_step()[1])
        if world.side.status()["tier"]["disk"] == records:
            return
        time.sleep(0.01)
    raise AssertionError(world.side.status())


def engine(
    path: Path, monkeypatch: pytest.MonkeyPatch, model: bytes = b"model", **options: Any
) -> Tiered:
    """One with files."""
    monkeypatch.setattr(start, "model_fingerprint", lambda *args: model * 4)
    return Tiered(files={"path": str(path), "disk_gib": 0.1, "wait_ms": 60_000} | options)


def computed(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Tiered:
    """An engine that has computed a document."""
    world = engine(path, monkeypatch, **options)
    world.run(world.add(DOCUMENT))
    world.end_step()
    return world


def stored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has stored a document, and has ended."""
    world = computed(path, monkeypatch)
    world.report(world.evict_all())
    wait_for(world, 8)
    world.side.close()


def test_a_document_is_reused_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, monkeypatch)
    world = engine(tmp_path, monkeypatch)
    assert world.match(world.add(PROMPT, OTHER), 0) == 0
    request = world.add(PROMPT)
    assert world.side.status()["tier"]["disk"] == 8
    supplied = None
    for _ in range(1000):
        supplied = world.match(request, 0)
        if supplied is not None:
            break
        world.end_step()
        time.sleep(0.01)
    assert supplied == len(PROMPT) - 1
    world.side.finished(request, [])
    world.end_step()
    world.side.close()


def test_a_document_of_a_knowledge_base_is_held_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = engine(tmp_path, monkeypatch)
    world.run(world.add(DOCUMENT))
    world.end_step()
    blocks = [block for block in range(world.pool.num_gpu_blocks) if block in world.index]
    assert parts_of(world.side).tier is not None
    parts_of(world.side).tier.documents.keep("doc", 0, 1, blocks)
    wait_for(world, 8)
    world.side.close()
    again = engine(tmp_path, monkeypatch)
    assert parts_of(again.side).tier is not None
    assert parts_of(again.side).tier.documents.held() == {"doc": "disk"}
    parts_of(again.side).tier.documents.release(["doc"])
    again.side.close()


def test_what_is_computed_again_is_not_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, monkeypatch)
    stored(tmp_path, monkeypatch)
    world = engine(tmp_path, monkeypatch)
    world.add(PROMPT)
    assert world.side.status()["tier"]["disk"] == 8
    world.side.close()


def test_another_models_records_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, monkeypatch)
    world = engine(tmp_path, monkeypatch, b"other")
    assert world.match(world.add(PROMPT), 0) == 0
    assert world.side.status()["tier"]["disk"] == 0
    world.side.close()


def finds(world: Tiered) -> bool:
    """Whether a request finds the document, in files or anywhere else."""
    request = world.add(PROMPT)
    supplied: int | None = None
    for _ in range(1000):
        supplied = world.match(request, 0)
        if supplied is not None:
            break
        world.report(world.end_step()[1])
        time.sleep(0.01)
    world.side.finished(request, [])
    return supplied == len(PROMPT) - 1


def test_after_a_reset_files_are_read_once_the_weights_are_known_to_be_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, monkeypatch)
    world = engine(tmp_path, monkeypatch)
    assert world.end_step()[1] is None, "at the start they are"
    assert world.pool.reset_prefix_cache()
    assert world.match(world.add(PROMPT), 0) == 0
    assert not world.side.has_pending_work, "a model that sleeps has no weights to look at"
    assert world.end_step(runs_model=False)[1] is None
    _, orders = world.end_step()
    assert orders is not None
    assert orders.verify
    assert world.match(world.add(PROMPT), 0) == 0, "no worker has answered"
    world.report(orders)
    assert finds(world)
    assert world.end_step()[1] is None or not world.end_step()[1].verify, "once"
    world.side.close()


def test_files_stay_hidden_while_the_model_has_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, monkeypatch)
    world = engine(tmp_path, monkeypatch)
    assert world.pool.reset_prefix_cache()
    with caplog.at_level("WARNING", "vllm.segreuse"):
        world.report(world.end_step()[1], other_weights=True)
    assert "has other weights than at the start" in caplog.text
    assert not finds(world)
    world.run(world.add(DOCUMENT))
    world.report(world.end_step()[1])
    world.report(world.evict_all())
    assert world.side.status()["tier"]["disk"] == 0, "nothing is written of them"
    assert world.pool.reset_prefix_cache()
    world.report(world.end_step()[1])
    assert finds(world), "the weights of the start are back"
    world.side.close()


def test_what_was_seen_before_a_reset_says_nothing_of_the_weights_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, monkeypatch)
    world = engine(tmp_path, monkeypatch)
    assert world.pool.reset_prefix_cache()
    _, early = world.end_step()
    assert world.pool.reset_prefix_cache()
    world.report(early)
    assert not finds(world)
    _, late = world.end_step()
    assert late is not None
    world.report(late, other_weights=True)
    assert not finds(world)
    world.side.close()


def test_a_budget_of_few_records_is_refused_and_nothing_is_removed(tmp_path: Path) -> None:
    view = Region(ROW_BYTES).create_kv_memoryview()
    known = view, bytes(32), lambda key: None
    needed_gib = 16 * record_bytes(view.strides[0]) / 2**30
    path = str(tmp_path / "tier")
    few = r"tier\.disk_gib is .*, which holds 15 records of 0.0 MiB; give it room for 16 at least"
    with pytest.raises(RefusedError, match=few):
        open_files(TierOptions(path=path, disk_gib=needed_gib - 2**-30), *known)
    assert not os.path.exists(path)
    tier = open_files(TierOptions(path=path, disk_gib=needed_gib), *known)
    assert tier.num_slots == 16
    tier.shutdown()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no key")
    for wrong in (
        {"path": str(tmp_path / "file")},
        {"path": "x", "key_file": str(tmp_path / "file")},
    ):
        options = TierOptions(disk_gib=1, **wrong)
        view = Region(ROW_BYTES).create_kv_memoryview()
        with pytest.raises(RefusedError, match="files cannot be kept in"):
            open_files(options, view, bytes(32), lambda key: None)


def keep(world: Tiered) -> None:
    """A document of a knowledge base, which was computed before."""
    assert parts_of(world.side).tier is not None
    blocks = [block for block in range(world.pool.num_gpu_blocks) if block in world.index]
    parts_of(world.side).tier.documents.keep("doc", 0, 1, blocks)


def held_after_a_restart(
    world: Tiered, path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Place]:
    """The documents that the next engine finds."""
    world.side.close()
    again = engine(path, monkeypatch)
    assert parts_of(again.side).tier is not None
    held = parts_of(again.side).tier.documents.held()
    again.side.close()
    return held


def test_a_document_that_is_deleted_and_added_again_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = computed(tmp_path, monkeypatch)
    keep(world)
    wait_for(world, 8)
    assert parts_of(world.side).tier is not None
    parts_of(world.side).tier.documents.release(["doc"])
    wait_for(world, 0)
    keep(world)
    wait_for(world, 8)
    assert held_after_a_restart(world, tmp_path, monkeypatch) == {"doc": "disk"}


def test_a_document_that_is_added_again_while_it_is_erased_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = computed(tmp_path, monkeypatch)
    keep(world)
    wait_for(world, 8)
    hang, remove = Hang(), Disk.remove
    monkeypatch.setattr(Disk, "remove", lambda disk, path: (hang(), remove(disk, path))[1])
    assert parts_of(world.side).tier is not None
    parts_of(world.side).tier.documents.release(["doc"])
    assert hang.reached.wait(30)
    keep(world)
    world.report(world.end_step()[1])
    assert world.side.has_pending_work
    hang.released.set()
    wait_for(world, 0)
    wait_for(world, 8)
    assert not world.side.has_pending_work
    assert held_after_a_restart(world, tmp_path, monkeypatch) == {"doc": "disk"}


def test_a_document_that_a_full_disk_did_not_take_is_written_after_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = computed(tmp_path, monkeypatch)
    assert parts_of(world.side).tier is not None
    tier, now = parts_of(world.side).tier.files, 0.0
    assert isinstance(tier, FileStore)
    monkeypatch.setattr(tier, "_clock", lambda: now)
    with monkeypatch.context() as full:
        full.setattr(Disk, "create", lambda *_: raises(errno.ENOSPC)())
        keep(world)
        while tier.counts["no_space"] < 8:
            world.report(world.end_step()[1])
            tier.drain_jobs()
    world.report(world.end_step()[1])
    assert not world.side.has_pending_work, "writes pause"
    assert tier.num_records == 0
    now += PAUSES_S[1]
    assert world.side.has_pending_work
    wait_for(world, 8)
    assert tier.counts["no_space"] == 8
    assert not world.side.has_pending_work
    assert held_after_a_restart(world, tmp_path, monkeypatch) == {"doc": "disk"}


@pytest.mark.parametrize("deleted", [False, True])
def test_what_one_engine_deletes_does_not_come_back_from_another_ones_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """The other has the same text in GPU memory, or has read it from the files."""
    first = computed(tmp_path, monkeypatch, zeroise=True)
    assert parts_of(first.side).tier is not None
    blocks = [block for block in range(first.pool.num_gpu_blocks) if block in first.index]
    parts_of(first.side).tier.documents.keep("doc", 0, 1, blocks)
    wait_for(first, 8)
    second = computed(tmp_path, monkeypatch, zeroise=True)
    wait_for(second, 8)
    if deleted:
        parts_of(first.side).tier.documents.release(["doc"])
        wait_for(first, 0)
        wait_for(second, 0)
    second.report(second.evict_all())
    for _ in range(50):
        second.report(second.end_step()[1])
        time.sleep(0.01)
    tier = second.side.status()["tier"]
    assert (tier["host"] > 0, tier["disk"]) == ((False, 0) if deleted else (True, 8))
    if deleted:
        second.run(second.add(DOCUMENT))
        second.end_step()
        second.end_step()
        second.report(second.evict_all())
        wait_for(second, 8)
    second.side.close()
    first.side.close()


def test_what_another_engine_deletes_stays_a_document_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = computed(tmp_path, monkeypatch)
    tier = parts_of(world.side).tier
    assert tier is not None
    blocks = [block for block in range(world.pool.num_gpu_blocks) if block in world.index]
    tier.documents.keep("doc", 0, 1, blocks)
    wait_for(world, 8)
    tier.erased_elsewhere([record.key for record in tier.catalogue])
    world.report(world.evict_all())
    wait_for(world, 8)
    assert tier.documents.held() == {"doc": "host"}
    world.side.close()
