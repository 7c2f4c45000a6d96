# SPDX-License-Identifier: Apache-2.0
"""The store as vLLM's manager of tiers uses it, and as the options open it."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from segreuse_store import FileStore, StoredRecord
from tests.store.records import FINGERPRINT, PAYLOAD_BYTES, key_of, payload_of
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.features.tier.files import FileTier, open_files
from vllm_segreuse.features.tier.options import TierOptions
from vllm_segreuse.features.tier.record import About, packed

ROWS = 8
NO_STEP = ScheduleEndContext((), ())


def record(number: int) -> StoredRecord:
    about = About(np.arange(number, number + 32, dtype=np.int32), 32 * number, 0, None)
    return StoredRecord(key_of(number), packed(about, []))


class Tiers:
    """vLLM's manager with a host tier of `ROWS` rows, and ours behind it."""

    def __init__(self, path: Path) -> None:
        region = SharedOffloadRegion(
            uuid.uuid4().hex, ROWS, None, PAYLOAD_BYTES, PAYLOAD_BYTES, barrier=lambda: None
        )
        self.primary = CPUPrimaryTierOffloadingManager(ROWS, region)
        view = self.primary.get_kv_memoryview()
        self.rows = np.asarray(view)
        described = {key_of(n): record(n) for n in range(100)}
        options = TierOptions(path=str(path), disk_gib=1)
        self.files = open_files(options, view, FINGERPRINT, described.get)
        self.manager = TieringOffloadingManager(self.primary, [FileTier(view, self.files)])
        self.contexts = 0

    def context(self) -> ReqContext:
        self.contexts += 1
        context = ReqContext(str(self.contexts))
        self.manager.on_new_request(context)
        return context

    def store(self, *numbers: int) -> None:
        context = self.context()
        keys = [OffloadKey(key_of(number)) for number in numbers]
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        assert output.keys_to_store == keys
        rows = output.store_spec.chunk_ids  # type: ignore[attr-defined]
        for number, row in zip(numbers, rows, strict=True):
            self.rows[row] = np.frombuffer(payload_of(number), dtype=self.rows.dtype)
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.step()

    def step(self) -> None:
        self.manager.on_schedule_end(NO_STEP)
        self.files.drain_jobs()

    def load(self, number: int) -> bytes:
        """What the row holds once the record is in host memory."""
        context, key = self.context(), OffloadKey(key_of(number))
        found = self.manager.lookup(key, context)
        if found is LookupResult.HIT_PENDING:
            self.step()
            found = self.manager.lookup(key, context)
        if found is not LookupResult.HIT:
            return b""
        (row,) = self.manager.prepare_load([key], context).chunk_ids  # type: ignore[attr-defined]
        held = self.rows[row].tobytes()
        self.manager.complete_load([key], context)
        self.manager.on_request_finished(context)
        self.step()
        return held

    def shutdown(self) -> None:
        del self.rows
        self.manager.shutdown()


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path)
    yield tiers
    tiers.shutdown()


def test_what_host_memory_has_lost_comes_from_files(tiers: Tiers) -> None:
    for number in range(0, 40, 4):
        tiers.store(*range(number, number + 4))
    for number in (0, 39, 17, 3):
        assert tiers.load(number) == payload_of(number)
    assert tiers.load(99) == b""
    assert not tiers.manager.has_pending_work()


def test_a_damaged_file_is_a_miss(tiers: Tiers, tmp_path: Path) -> None:
    tiers.store(0)
    for file in tmp_path.glob("*/files/*/*"):
        file.write_bytes(file.read_bytes()[::-1])
    for number in range(4, 20, 4):
        tiers.store(*range(number, number + 4))
    assert tiers.load(0) == b""
    assert tiers.load(5) == payload_of(5)


def test_files_outlive_the_reset_of_host_memory(tiers: Tiers) -> None:
    tiers.store(0, 1)
    tiers.manager.reset_cache()
    if hasattr(tiers.manager, "on_reset_flushed"):  # vLLM 0.33 waits for what is in flight
        tiers.manager.on_reset_flushed()
    assert tiers.load(1) == payload_of(1)


def opened(path: str, **options: object) -> FileStore:
    view = memoryview(np.zeros((ROWS, PAYLOAD_BYTES), dtype=np.int8))
    described = TierOptions(path=path, disk_gib=1, **options)  # type: ignore[arg-type]
    return open_files(described, view, FINGERPRINT, lambda key: None)


def test_keys_are_read_from_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("11" * 32)
    of_the_file = opened(str(tmp_path), key_file=str(tmp_path / "key"))
    monkeypatch.setenv("SEGREUSE_TIER_KEY", "11" * 32)
    of_the_environment = opened(str(tmp_path))
    monkeypatch.delenv("SEGREUSE_TIER_KEY")
    plain = opened(str(tmp_path))
    models = [tier.folder.path for tier in (of_the_file, of_the_environment, plain)]
    assert models[0] == models[1] != models[2]
    for tier in (of_the_file, of_the_environment, plain):
        tier.shutdown()


@pytest.mark.parametrize(("codec", "number"), [("raw", 0), ("int8", 1), ("fp8", 2)])
def test_files_say_by_which_codec_they_are(tmp_path: Path, codec: str, number: int) -> None:
    view = memoryview(np.zeros((ROWS, PAYLOAD_BYTES), dtype=np.int8))
    options = TierOptions(path=str(tmp_path), disk_gib=1, codec=codec)  # type: ignore[arg-type]
    files = open_files(options, view, FINGERPRINT, lambda key: record(1))
    files.submit_store(1, [key_of(1)], [0])
    files.shutdown()
    [file] = tmp_path.glob("*/files/*/*")
    header = file.read_bytes()[PAYLOAD_BYTES:]
    assert header[:11] == b"SEGREUSE\1\0" + bytes([number])


def test_what_was_opened_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = tmp_path / "key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    for options, how in (({}, "not encrypted"), ({"key_file": str(key)}, "encrypted")):
        caplog.clear()
        with caplog.at_level("INFO", "vllm.segreuse"):
            store = opened(str(tmp_path), **options)
        assert caplog.messages == [f"segment reuse: 0 records in {store.folder.path}, {how}"]
        store.shutdown()


def test_what_cannot_be_opened_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RefusedError, match=r"cannot be kept in /dev/null/x: .*Not a directory.*"):
        opened("/dev/null/x")
    with pytest.raises(RefusedError, match=r"key file .* cannot be read: No such file"):
        opened(str(tmp_path), key_file=str(tmp_path / "key"))
    monkeypatch.setenv("SEGREUSE_TIER_KEY", "secret")
    with pytest.raises(RefusedError, match="SEGREUSE_TIER_KEY must hold a key of 32 bytes"):
        opened(str(tmp_path))
