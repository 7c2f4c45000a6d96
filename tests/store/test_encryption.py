# SPDX-License-Identifier: Apache-2.0
"""Encrypted records: nothing of a prompt is on disk, and nothing opens what was erased."""

import base64
import os
import sqlite3
from pathlib import Path

import pytest

from segreuse_store.encryption import Aes256Gcm, master_key
from segreuse_store.folder import LostError
from segreuse_store.sealing import KEY_ENV, CorruptError
from tests.store import records
from tests.store.records import SLOTS, folder, key_of, payload_of, record

KEY = bytes(range(100, 132))


def test_records_outlive_a_restart_with_the_same_key(tmp_path: Path) -> None:
    store = folder(tmp_path, Aes256Gcm(KEY))
    given = record(1, labels=[store.digest(b"alice")])
    store.write([(store.new(given), payload_of(1))], SLOTS)
    store.close()
    store = folder(tmp_path, Aes256Gcm(KEY))
    (kept,) = store.at_start
    assert bytes(store.read(kept)) == payload_of(1)
    assert (kept.key, kept.about) == (given.key, given.about)
    assert kept.about.endswith(store.digest(b"alice") + b"the text of 1")


@pytest.mark.parametrize("other", [bytes(32), None])
def test_another_key_or_none_sees_another_store(tmp_path: Path, other: bytes | None) -> None:
    store = folder(tmp_path, Aes256Gcm(KEY))
    store.write([(store.new(record(1)), payload_of(1))], SLOTS)
    store.close()
    stranger = folder(tmp_path, Aes256Gcm(other) if other else None)
    assert stranger.at_start == []
    stranger.close()
    assert len(folder(tmp_path, Aes256Gcm(KEY)).at_start) == 1


def test_nothing_of_a_record_is_readable(tmp_path: Path) -> None:
    store = folder(tmp_path, Aes256Gcm(KEY))
    store.write([(store.new(record(7)), payload_of(7))], SLOTS)
    store.close()
    secrets = (b"the text of 7", payload_of(7)[:64], key_of(7), KEY)
    for file in tmp_path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert not [secret for secret in secrets if secret in content], file


def test_equal_records_are_different_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("first", "second"):
        store = folder(tmp_path / name, Aes256Gcm(KEY))
        store.write([(store.new(record(1)), payload_of(1))], SLOTS)
        (file,) = records.files(tmp_path / name)
        contents.append(file.read_bytes()[: records.PAYLOAD_BYTES])
    assert contents[0] != contents[1]


@pytest.mark.parametrize("at", [0, 4000, records.PAYLOAD_BYTES + 20, -1, -20])
def test_a_flipped_bit_is_noticed(tmp_path: Path, at: int) -> None:
    store = folder(tmp_path, Aes256Gcm(KEY))
    kept = store.new(record(1))
    store.write([(kept, payload_of(1))], SLOTS)
    (file,) = records.files(tmp_path)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(LostError, match="corrupt"):
        store.read(kept)


def test_exchanged_files_and_rows_are_noticed(tmp_path: Path) -> None:
    store = folder(tmp_path, Aes256Gcm(KEY))
    kept = [store.new(record(number)) for number in (1, 2)]
    store.write([(kept[0], payload_of(1)), (kept[1], payload_of(2))], SLOTS)
    exchanged = kept[0]._replace(name=kept[1].name)
    with pytest.raises(LostError, match="corrupt"):
        store.read(exchanged)
    # The whole row but for its name, with the other's key: the file belongs to another context.
    with pytest.raises(LostError, match="corrupt"):
        store.read(exchanged._replace(secret=kept[1].secret))
    with sqlite3.connect(os.path.join(store.path, "records.sqlite")) as sql:
        columns = "SELECT secret, about FROM records WHERE name = ?"
        row = sql.execute(columns, (kept[0].name,)).fetchone()
        update = "UPDATE records SET secret = ?, about = ? WHERE name = ?"
        sql.execute(update, (*row, kept[1].name))
    store.close()
    assert [row.key for row in folder(tmp_path, Aes256Gcm(KEY)).at_start] == [key_of(1)]


def test_every_record_has_a_key_of_its_own() -> None:
    """Otherwise the row of any other record would open what was erased."""
    sealer = Aes256Gcm(KEY)
    first, second = sealer.new_secret(), sealer.new_secret()
    body, proof = sealer.seal(first, b"context", b"payload")
    assert bytes(sealer.open(first, b"context", body, proof)) == b"payload"
    with pytest.raises(CorruptError):
        sealer.open(second, b"context", body, proof)


def test_nothing_opens_an_erased_record(tmp_path: Path) -> None:
    """Not with the master key either: a copy of its file was made before."""
    store = folder(tmp_path, Aes256Gcm(KEY))
    kept = [store.new(record(number)) for number in (1, 2)]
    store.write([(kept[0], payload_of(1)), (kept[1], payload_of(2))], SLOTS)
    store.release([kept[0].key])
    for file in Path(store.path).iterdir():
        content = file.read_bytes() if file.is_file() else b""
        assert kept[0].secret not in content, file
    store.close()
    assert [row.key for row in folder(tmp_path, Aes256Gcm(KEY)).at_start] == [key_of(2)]


@pytest.mark.parametrize("text", [KEY.hex(), KEY.hex().upper(), base64.b64encode(KEY).decode()])
def test_keys_are_hex_or_base64(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text + "\n")
    assert master_key(str(file), {}) == KEY
    assert master_key(None, {KEY_ENV: text}) == KEY
    assert master_key(str(file), {KEY_ENV: "other"}) == KEY


@pytest.mark.parametrize("text", ["", "ab", KEY.hex() + "00", "no key", "\u00e9" * 32])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ValueError, match="must hold a key of 32 bytes"):
        master_key(str(file), {})
    with pytest.raises(ValueError, match=f"{KEY_ENV} must hold"):
        master_key(None, {KEY_ENV: text})


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o600, False), (0o700, False), (0o640, True), (0o604, True)]
)
def test_a_key_that_others_can_read_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_open: bool
) -> None:
    file = tmp_path / "key"
    file.write_text(KEY.hex())
    file.chmod(mode)
    with caplog.at_level("WARNING", "vllm.segreuse"):
        assert master_key(str(file), {}) == KEY
    assert ("can be read by other users" in caplog.text) == is_open


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        master_key(str(tmp_path / "key"), {})
