# SPDX-License-Identifier: Apache-2.0
"""The log: private, rotated, and never an error of a request."""

import json
import os
import stat
from pathlib import Path

import pytest

from segreuse_extras.audit.log import AuditLog, path_of


class Errors:
    """How many lines were not written."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def opened(path: Path, errors: Errors, max_bytes: int = 4096, files: int = 2) -> AuditLog:
    return AuditLog(path, max_bytes, files, errors)


def test_each_line_is_an_object(tmp_path: Path) -> None:
    path, errors = tmp_path / "audit.jsonl", Errors()
    log = opened(path, errors)
    log.write({"kl": 0.5, "prompt": "naïve\n東京 %s"})
    log.write({"kl": None})
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"kl": 0.5, "prompt": "naïve\n東京 %s"},
        {"kl": None},
    ]
    assert errors.count == 0


def test_only_its_owner_may_read_it_also_after_it_was_rotated(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        log = opened(tmp_path / "audit.jsonl", Errors())
        for _ in range(200):
            log.write({"text": 100 * "x"})
    finally:
        os.umask(before)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert all(0 < file.stat().st_size <= 4096 for file in files)


def test_a_file_that_others_could_read_is_theirs_no_more(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("{}\n")
    path.chmod(0o644)
    log = opened(path, Errors())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    log.write({"a": 1})
    assert path.read_text() == '{}\n{"a":1}\n'


def test_a_file_of_another_user_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    path.touch()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match=r"another user \(uid \d+\).*: remove it"):
        opened(path, Errors())


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for number in range(2):
        log = opened(path, Errors())
        log.write({"number": number})
        log.close()
    assert len(path.read_text().splitlines()) == 2


def test_a_full_disk_is_counted(tmp_path: Path) -> None:
    errors = Errors()
    full = tmp_path / "audit.jsonl"
    full.symlink_to("/dev/full")
    log = opened(full, errors, max_bytes=10**9)
    log.write({"a": 1})
    log.write({"a": 2})
    assert errors.count == 2


def test_a_folder_that_has_gone_is_counted(tmp_path: Path) -> None:
    folder, errors = tmp_path / "logs", Errors()
    folder.mkdir()
    log = opened(folder / "audit.jsonl", errors)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    for _ in range(100):  # until it is rotated, and there is nothing to open
        log.write({"text": 100 * "x"})
    assert errors.count > 0
    folder.mkdir()
    log.write({"text": "again"})
    assert '"again"' in (folder / "audit.jsonl").read_text()


def test_what_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        opened(tmp_path / "missing" / "audit.jsonl", Errors())


def test_every_engine_has_a_file_of_its_own() -> None:
    assert path_of("/var/log/audit.jsonl", 0) == Path("/var/log/audit.jsonl")
    assert path_of("/var/log/audit.jsonl", 2) == Path("/var/log/audit-2.jsonl")
    assert path_of("audit", 1) == Path("audit-1")
