# SPDX-License-Identifier: Apache-2.0
"""A store that zeroises leaves nothing of a record in its buffers."""

from pathlib import Path
from typing import Any

import pytest

from segreuse_store import encryption
from segreuse_store.encryption import Aes256Gcm
from segreuse_store.sealing import Checksum, CorruptError, Sealer
from tests.store.records import payload_of
from tests.store.test_file_store import Engine


@pytest.mark.parametrize("sealer", [Checksum(), Aes256Gcm(bytes(32))])
@pytest.mark.parametrize("zeroises", [False, True])
def test_copies_of_rows_on_the_way_to_files_are_zeroed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealer: Sealer, zeroises: bool
) -> None:
    engine = Engine(tmp_path, sealer=sealer, zeroises=zeroises)
    folder = engine.tier.folder
    seen: list[Any] = []
    write, read = folder.write, folder.read

    def writing(new: Any, slots: int) -> Any:
        seen.extend(payload for _, payload in new)
        return write(new, slots)

    def reading(kept: Any) -> Any:
        seen.append(read(kept))
        return seen[-1]

    monkeypatch.setattr(folder, "write", writing)
    monkeypatch.setattr(folder, "read", reading)
    assert engine.store(1, 2).success
    assert engine.load(1, 2) == [1, 2]
    assert len(seen) == 4
    assert [any(bytes(payload)) for payload in seen] == [not zeroises] * 4
    engine.tier.shutdown()


def test_bytes_that_are_not_proven_are_not_left_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytearray] = []

    def remembered(size: int) -> bytearray:
        made.append(bytearray(size))
        return made[-1]

    monkeypatch.setattr(encryption, "bytearray", remembered, raising=False)
    sealer = Aes256Gcm(bytes(32))
    secret = sealer.new_secret()
    sealed, proof = sealer.seal(secret, b"context", payload_of(1))
    assert bytes(memoryview(sealer.open(secret, b"context", sealed, proof))) == payload_of(1)
    with pytest.raises(CorruptError):
        sealer.open(secret, b"another", sealed, proof)
    assert len(made) == 2
    assert not any(made[1])
