# SPDX-License-Identifier: Apache-2.0
"""What was stored in files is found by the next engine, in its own namespace only."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.test_scheduler import DOCUMENT, OPTIONS, PROMPT
from tests.tier.fakes import ROW_BYTES, Region
from tests.tier.test_scheduler_side import Tiered
from vllm_segreuse import scheduler
from vllm_segreuse.supported import RefusedError
from vllm_segreuse.tier.files import open_file_tier
from vllm_segreuse.tier_options import TierOptions

OTHER = OPTIONS | {"extra_keys": "others"}


def wait_for(world: Tiered, records: int) -> None:
    """Until so many records are on disk."""
    for _ in range(1000):
        world.report(world.end_step()[1])
        if world.side.status()["tier"]["disk"] == records:
            return
        time.sleep(0.01)
    raise AssertionError(world.side.status())


def engine(path: Path, monkeypatch: pytest.MonkeyPatch, model: bytes = b"model") -> Tiered:
    """One with files."""
    monkeypatch.setattr(scheduler, "model_fingerprint", lambda *args: model * 4)
    return Tiered(files={"path": str(path), "disk_gib": 0.1, "wait_ms": 60_000})


def stored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has stored a document, and has ended."""
    world = engine(path, monkeypatch)
    world.run(world.add(DOCUMENT))
    world.end_step()
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


def test_after_a_reset_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, monkeypatch)
    world = engine(tmp_path, monkeypatch)
    assert world.pool.reset_prefix_cache()
    assert world.match(world.add(PROMPT), 0) == 0
    world.side.close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no key")
    for wrong in (
        {"path": str(tmp_path / "file")},
        {"path": "x", "key_file": str(tmp_path / "file")},
    ):
        options = TierOptions(disk_gib=1, **wrong)
        view = Region(ROW_BYTES).create_kv_memoryview()
        with pytest.raises(RefusedError, match="files cannot be kept in"):
            open_file_tier(options, view, bytes(32), lambda key: None)
