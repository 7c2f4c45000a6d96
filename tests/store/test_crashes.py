# SPDX-License-Identifier: Apache-2.0
"""`kill -9` between any two steps on disk: nothing wrong is read afterwards, nothing is lost that
was reported as stored, and files never take more than the budget."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import struct
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from segreuse_store import database
from segreuse_store import folder as folder_module
from segreuse_store.disk import Disk
from segreuse_store.folder import LostError, RecordFolder
from segreuse_store.sqlite import open_private
from tests.store import records
from tests.store.records import about_of, folder, key_of, payload_of, record

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


class Killed(NamedTuple):
    """A process that works on a store until it is killed, and what it says."""

    process: int
    messages: int

    def said(self, dies: bool) -> list[tuple[int, int]]:
        """What it has reported, once it has ended."""
        with open(self.messages, "rb") as messages:
            said = list(_MESSAGE.iter_unpack(messages.read()))
        status = os.waitpid(self.process, 0)[1]
        assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if dies else 0)
        return said


def forked(run: Callable[[int], None]) -> Killed:
    """A process that runs this with a descriptor for its messages."""
    reading, report = os.pipe()
    child = os.fork()
    if not child:
        failed = 1
        try:
            os.close(reading)
            run(report)
            failed = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(failed)
    os.close(report)
    return Killed(child, reading)


def work(path: Path, seed: int, disk: DeadlyDisk, report: int) -> None:
    """Stores and removes, as `FileStore` does; reports what begins and what is over."""

    def say(what: int, number: int) -> None:
        os.write(report, _MESSAGE.pack(what, number))

    opened: list[sqlite3.Connection] = []

    def remembered(*args: Any, **named: Any) -> sqlite3.Connection:
        opened.append(open_private(*args, **named))
        return opened[-1]

    database.open_private = remembered  # this process ends soon
    store = folder(path, disk=disk)
    (sql,) = opened
    sql.set_trace_callback(disk.step)
    known = {kept.key: kept.name for kept in store.at_start}
    draw = random.Random(seed)
    for number in range(OPERATIONS):
        if draw.random() < 0.2 and known:
            key = next(iter(known))
            say(REMOVING, NUMBERS[key])
            store.release([key])
            del known[key]
            say(REMOVED, NUMBERS[key])
        say(STORING, number)
        written = store.write([(store.new(record(number)), payload_of(number))], SLOTS)
        for key in [key for key, name in known.items() if name in written.removed]:
            del known[key]
            say(REMOVED, NUMBERS[key])
        for kept in (*written.stored, *written.there):
            known[kept.key] = kept.name
            say(STORED, number)
    say(STEPS, disk.steps)
    store.close()


def killed(path: Path, seed: int, die_at: int) -> list[tuple[int, int]]:
    """What a process reported that worked on the store until it was killed."""
    child = forked(lambda report: work(path, seed, DeadlyDisk(die_at), report))
    return child.said(dies=die_at < NEVER)


def check(path: Path, said: list[tuple[int, int]]) -> None:
    """What is there is right, and as the process reported."""
    certain: set[int] = set()
    possible: set[int] = set()
    making_room = False
    for what, number in said:
        making_room = what == STORING
        if what == STORING:
            possible.add(number)
        elif what == STORED:
            certain.add(number)
        elif what == REMOVING:
            certain.discard(number)
        elif what == REMOVED:
            certain.discard(number)
            possible.discard(number)
    assert len(records.files(path)) <= SLOTS
    store = folder(path)
    found = {NUMBERS[kept.key]: kept for kept in store.at_start}
    assert set(found) <= possible
    assert len(certain - set(found)) <= making_room
    check_content(path, store)
    store.close()


def check_content(path: Path, store: RecordFolder) -> None:
    for kept in store.at_start:
        number = NUMBERS[kept.key]
        assert bytes(store.read(kept)) == payload_of(number)
        assert kept.about == about_of(number)
    names = {f"{file.parent.name}/{file.name}" for file in records.files(path)}
    assert names == {kept.name for kept in store.at_start}


def in_a_small_process(check: Callable[..., None], *arguments: Any) -> None:
    """A fork copies the page tables of its process: hundreds of them take minutes in one that has
    run other tests, and seconds in one that has loaded nothing else."""
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        alone.submit(check, *arguments).result()


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Path]:
    """A folder for stores: in memory, where what a killed process has written stays as on a disk,
    and no `fsync` is waited for."""
    memory = "/dev/shm"
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=memory) as made:
        yield Path(made)


@pytest.mark.parametrize(("seed", "every"), [(0, 40), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_nothing_is_wrong_after_a_kill_at_any_step(stores: Path, seed: int, every: int) -> None:
    in_a_small_process(kill_at_any_step, stores, seed, every)


def kill_at_any_step(stores: Path, seed: int, every: int) -> None:
    draw = random.Random(seed)
    said = killed(stores / "whole", seed, NEVER)
    what, steps = said.pop()
    assert what == STEPS
    assert steps > 60
    check(stores / "whole", said)
    for die_at in range(draw.randrange(every) + 1, steps + 1, every):
        path = stores / f"{die_at}"
        check(path, killed(path, seed, die_at))
        killed(path, seed + 1, draw.randrange(1, 60))
        # What that one has left is removed by one that dies as well.
        killed(path, seed + 2, draw.randrange(1, 20))
        assert len(records.files(path)) <= SLOTS
        store = folder(path)
        check_content(path, store)
        store.close()
        shutil.rmtree(path)


def go_on(path: Path, seed: int, until: int, report: int) -> None:
    """An engine that runs beside one that is killed: whatever it reads is right, and it never sees
    more files than the budget allows. It ends once nothing can be read from `until`."""
    store = folder(path)
    draw = random.Random(seed)
    known = {kept.name: kept for kept in store.at_start}
    os.write(report, _MESSAGE.pack(STORING, 0))
    os.set_blocking(until, False)
    is_last = False
    reasons: set[str] = set()
    while not is_last:
        with contextlib.suppress(BlockingIOError):
            is_last = os.read(until, 1) == b""
        number = draw.randrange(OPERATIONS)
        if draw.random() < 0.2:
            store.release([key_of(number)])
        written = store.write([(store.new(record(number)), payload_of(number))], SLOTS)
        changes = store.changes()
        known |= {kept.name: kept for kept in (*written.stored, *written.there, *changes.coming)}
        for kept in [*known.values()]:
            try:
                content = bytes(store.read(kept))
            except LostError as error:
                reasons.add(error.reason)
                del known[kept.name]
            else:
                assert content == payload_of(NUMBERS[kept.key])
        assert len(os.listdir(os.path.join(store.path, "files", "00"))) <= SLOTS
    assert reasons <= {"missing"}
    store.clean()
    with contextlib.closing(sqlite3.connect(os.path.join(store.path, "records.sqlite"))) as sql:
        rows = sql.execute("SELECT name, state FROM records").fetchall()
    assert {state for _, state in rows} <= {1}, "what the dead engine has begun is over"
    names = {name for name, _ in rows}
    files = {f"00/{name}" for name in os.listdir(os.path.join(store.path, "files", "00"))}
    assert files == names
    assert store.slots_used == len(files) <= SLOTS
    store.close()


def beside(path: Path, seed: int) -> tuple[Killed, int]:
    """An engine that goes on until the descriptor is closed."""
    until, end = os.pipe()

    def run(report: int) -> None:
        os.close(end)
        go_on(path, seed, until, report)

    living = forked(run)
    os.close(until)
    return living, end


@pytest.mark.parametrize(("seed", "kills"), [(3, 6), pytest.param(4, 100, marks=pytest.mark.slow)])
def test_an_engine_that_is_killed_harms_no_other(stores: Path, seed: int, kills: int) -> None:
    in_a_small_process(kill_beside_another, stores, seed, kills)


def kill_beside_another(stores: Path, seed: int, kills: int) -> None:
    folder_module.FOLDERS = 1  # whose names are read at once
    draw = random.Random(seed)
    steps = killed(stores / "whole", seed, NEVER)[-1][1]
    for number in range(kills):
        path = stores / f"{number}"
        living, end = beside(path, number)
        assert os.read(living.messages, _MESSAGE.size), "it has opened the store"
        killed(path, seed + number, draw.randrange(1, steps // 2))
        os.close(end)
        living.said(dies=False)
        store = folder(path)
        check_content(path, store)
        store.close()
        shutil.rmtree(path)
