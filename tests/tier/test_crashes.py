# SPDX-License-Identifier: Apache-2.0
"""`kill -9` between any two steps on disk: nothing wrong is read afterwards, nothing is lost that
was reported as stored, and files never take more than the budget."""

from __future__ import annotations

import os
import random
import signal
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.tier import records
from tests.tier.records import folder, key_of, payload_of, record
from vllm_segreuse.tier import folder as folder_module
from vllm_segreuse.tier.disk import Disk
from vllm_segreuse.tier.folder import RecordFolder
from vllm_segreuse.tier.format import record_of
from vllm_segreuse.tier.residents import Residents

SLOTS = 3
OPERATIONS = 8
NUMBERS = {key_of(number): number for number in range(OPERATIONS)}
NEVER = 10**9

STORING, STORED, REMOVING, REMOVED, STEPS = range(5)
_MESSAGE = struct.Struct("<BI")


class DeadlyDisk(Disk):
    """Kills its process at one step; a step is what another process could see the effect of."""

    def __init__(self, die_at: int) -> None:
        self.steps = 0
        self._die_at = die_at

    def step(self, *_: object) -> None:
        self.steps += 1
        if self.steps == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: str) -> int:
        self.step()
        return super().create(path)

    def append(self, descriptor: int, data: memoryview) -> int:
        self.step()
        return super().append(descriptor, data[: max(1, len(data) // 2)])

    def sync(self, descriptor: int) -> None:
        self.step()  # what is written outlives the process without

    def sync_folder(self, path: str) -> None:
        self.step()

    def remove(self, path: str) -> None:
        self.step()
        super().remove(path)


def work(path: Path, seed: int, disk: DeadlyDisk, report: int) -> None:
    """Stores and removes, as the file tier does; reports what begins and what is over."""

    def say(what: int, number: int) -> None:
        os.write(report, _MESSAGE.pack(what, number))

    store = folder(path, disk=disk)
    store._database._sql.set_trace_callback(disk.step)
    residents = Residents(SLOTS, store.at_start)
    draw = random.Random(seed)
    for number in range(OPERATIONS):
        if draw.random() < 0.2 and (kept := next(iter(residents), None)) is not None:
            say(REMOVING, NUMBERS[kept.key])
            residents.release(kept.key)
            store.remove([kept])
            store.erase_removed()
            residents.vacate()
            say(REMOVED, NUMBERS[kept.key])
        if residents.get(key_of(number)) is not None:
            continue
        slot = residents.reserve(durable=False)
        assert slot is not None
        if slot.victim is not None:
            say(REMOVING, NUMBERS[slot.victim.key])
            store.remove([slot.victim])
            say(REMOVED, NUMBERS[slot.victim.key])
        say(STORING, number)
        new = store.new(record(number))
        store.write([(new, payload_of(number))])
        residents.fill(new)
        say(STORED, number)
    say(STEPS, disk.steps)
    store.close()


def killed(path: Path, seed: int, die_at: int) -> list[tuple[int, int]]:
    """What a process reported that worked on the store until it was killed."""
    reading, report = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            work(path, seed, DeadlyDisk(die_at), report)
        finally:
            os._exit(0)
    os.close(report)
    with open(reading, "rb") as messages:
        said = list(_MESSAGE.iter_unpack(messages.read()))
    _, status = os.waitpid(child, 0)
    assert (die_at < NEVER) == (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
    return said


def check(path: Path, said: list[tuple[int, int]]) -> None:
    """What is there is right, and as the process reported."""
    certain: set[int] = set()
    possible: set[int] = set()
    for what, number in said:
        if what == STORING:
            possible.add(number)
        elif what == STORED:
            certain.add(number)
        elif what == REMOVING:
            certain.discard(number)
        elif what == REMOVED:
            possible.discard(number)
    assert len(records.files(path)) <= SLOTS
    store = folder(path)
    found = {NUMBERS[kept.key]: kept for kept in store.at_start}
    assert certain <= set(found) <= possible
    check_content(path, store)
    store.close()


def check_content(path: Path, store: RecordFolder) -> None:
    for kept in store.at_start:
        number = NUMBERS[kept.key]
        assert bytes(store.read(kept)) == payload_of(number)
        np.testing.assert_array_equal(record_of(kept).tokens, record(number).tokens)
    names = {f"{file.parent.name}/{file.name}" for file in records.files(path)}
    assert names == {kept.name for kept in store.at_start}


@pytest.mark.parametrize(("seed", "every"), [(0, 15), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_nothing_is_wrong_after_a_kill_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, every: int
) -> None:
    monkeypatch.setattr(folder_module, "_FOLDERS", 4)  # quicker to make
    draw = random.Random(seed)
    said = killed(tmp_path / "whole", seed, NEVER)
    what, steps = said.pop()
    assert what == STEPS
    assert steps > 60
    check(tmp_path / "whole", said)
    for die_at in range(draw.randrange(every) + 1, steps + 1, every):
        path = tmp_path / f"{die_at}"
        check(path, killed(path, seed, die_at))
        killed(path, seed + 1, draw.randrange(1, 30))
        # What that one has left is removed by one that dies as well.
        killed(path, seed + 2, draw.randrange(1, 8))
        assert len(records.files(path)) <= SLOTS
        store = folder(path)
        check_content(path, store)
        store.close()
