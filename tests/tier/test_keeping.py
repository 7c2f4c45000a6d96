# SPDX-License-Identifier: Apache-2.0
"""Documents are stored whatever else is, stay when others go, and leave when they are deleted."""

from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

import pytest

from segreuse_store import GroupJournal, GroupPart, StoredRecord
from tests.cache.keeping import Journal
from vllm_segreuse.features.tier.keeping import Keeping
from vllm_segreuse.scheduling.health import Health


class Rows:
    """Blocks are stored at once, under keys that are their numbers."""

    def __init__(self) -> None:
        self.on_host: set[bytes] = set()
        self.erased: list[bytes] = []
        self.takes = True

    def write_through(self, block_ids: Sequence[int]) -> list[bytes]:
        return [key(block) for block in block_ids] if self.takes else []

    def is_on_host(self, key: bytes) -> bool:
        return key in self.on_host

    def erase(self, keys: Iterable[bytes]) -> None:
        self.erased += keys


class Files:
    """What is on disk, and whether it is durable."""

    def __init__(self) -> None:
        self.durable: dict[bytes, bool] = {}

    def lookup(self, key: bytes) -> bool:
        return key in self.durable

    def records(self) -> Iterable[StoredRecord]:
        for key, durable in self.durable.items():
            yield StoredRecord(key, b"", durable)

    needs_step = False

    def take_wanted(self) -> list[bytes]:
        return []

    def submit_store(self, job_id: int, keys: Iterable[bytes], rows: Iterable[int]) -> None:
        pass

    def set_durable(self, keys: Iterable[bytes], durable: bool) -> None:
        self.durable.update({key: durable for key in keys if key in self.durable})

    def erase(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.durable.pop(key, None)


class DocumentJournal(Journal):
    """Without a file."""

    def at_start(self) -> list[GroupPart]:
        return [GroupPart(entry, part, parts, [*keys]) for entry, part, parts, keys in self.read()]


def key(block: int) -> bytes:
    return bytes([block]) * 32


class World:
    def __init__(self) -> None:
        self.ticks = map(float, count(5))
        self.rows, self.files, self.journal = Rows(), Files(), DocumentJournal()
        self.start()

    def start(self) -> None:
        self.health = Health()
        journal: object = self.journal
        self.keeping = Keeping(
            *(self.rows, 10, self.health, self.ticks.__next__, self.files),
            journal,
        )  # type: ignore[arg-type]

    def stored(self, *blocks: int, on_disk: bool = True) -> None:
        """What was ordered is in host memory, and perhaps on disk."""
        for block in blocks:
            self.rows.on_host.add(key(block))
            if on_disk:
                self.files.durable[key(block)] = self.keeping.is_durable(key(block))
            self.keeping.moved(key(block), on_host=True, on_disk=on_disk)


@pytest.fixture
def world() -> World:
    return World()


def test_a_document_is_held_from_the_moment_that_it_is_stored(world: World) -> None:
    world.keeping.keep("doc", 0, 1, [1, 2])
    assert world.keeping.held() == {}
    world.stored(1, 2)
    assert world.keeping.held() == {"doc": "host"}
    assert world.files.durable == {key(1): True, key(2): True}
    for block in (1, 2):
        world.keeping.moved(key(block), on_host=False)
    assert world.keeping.held() == {"doc": "disk"}
    world.keeping.moved(key(2), on_disk=False)
    assert world.keeping.held() == {}


def test_records_that_are_there_before_become_durable(world: World) -> None:
    world.stored(1, 2)
    assert not any(world.files.durable.values())
    world.keeping.keep("doc", 0, 1, [1, 2])
    assert world.keeping.held() == {"doc": "host"}
    assert all(world.files.durable.values())


def test_what_is_deleted_is_erased_unless_another_document_has_it(world: World) -> None:
    world.keeping.keep("one", 0, 1, [1, 2])
    world.keeping.keep("two", 0, 1, [2, 3])
    world.stored(1, 2, 3)
    world.keeping.release(["one", "unknown"])
    assert world.files.durable.keys() == {key(2), key(3)}
    assert world.keeping.held() == {"two": "host"}


def test_after_a_restart_whole_documents_are_held_and_the_rest_is_erased(world: World) -> None:
    world.keeping.keep("whole", 0, 1, [1])
    world.keeping.keep("half", 0, 2, [2])
    world.keeping.keep("torn", 0, 1, [3, 4])
    world.stored(1, 2, 3, 4)
    del world.files.durable[key(4)]
    world.files.durable |= {key(5): False, key(6): True}  # of nobody; of a journal that is lost
    world.start()
    assert world.keeping.held() == {"whole": "disk"}
    assert world.files.durable == {key(1): True, key(5): False}


def test_documents_that_plans_read_are_used_once_by_each(world: World) -> None:
    world.keeping.keep("one", 0, 1, [1, 2])
    world.keeping.keep("two", 0, 1, [2, 3])
    world.keeping.read([key(1), key(1), key(9)])
    world.keeping.read([key(1), key(2)])
    assert world.keeping.take_uses() == {"one": (2, 6.0), "two": (1, 6.0)}
    assert world.keeping.take_uses() == {}
    world.keeping.read([key(3)])
    world.keeping.release(["two"])
    assert world.keeping.take_uses() == {}


def test_what_cannot_be_stored_is_not_kept(world: World) -> None:
    world.rows.takes = False
    world.keeping.keep("doc", 0, 1, [1])
    world.stored(1)
    assert world.keeping.held() == {}
    assert world.journal.rows == {}


def test_after_a_reset_nothing_is_held_until_the_weights_are_known(world: World) -> None:
    world.keeping.keep("doc", 0, 1, [1])
    world.stored(1)
    world.keeping.cleared()
    assert world.keeping.held() == {}
    world.keeping.revealed()
    assert world.keeping.held() == {"doc": "disk"}


def test_without_files_documents_are_held_in_host_memory(world: World) -> None:
    world.keeping = Keeping(world.rows, 10, Health(), float)
    world.keeping.keep("doc", 0, 1, [1])
    world.stored(1, on_disk=False)
    assert world.keeping.held() == {"doc": "host"}
    world.keeping.cleared()
    world.keeping.revealed()
    assert world.keeping.held() == {}
    world.keeping.release(["doc"])


def test_an_error_ends_the_tier_and_nothing_else(world: World) -> None:
    def fail(block_ids: Sequence[int]) -> list[bytes]:
        raise RuntimeError("broken on purpose")

    world.keeping.keep("doc", 0, 1, [1])
    world.stored(1)
    world.rows.write_through = fail  # type: ignore[method-assign]
    world.keeping.keep("next", 0, 1, [2])
    assert world.health.broken
    assert world.keeping.held() == {}, "nothing is read from it any more"


def test_documents_are_in_the_journal_as_they_are_held(world: World, tmp_path: Path) -> None:
    def started() -> GroupJournal:
        journal = GroupJournal(str(tmp_path / "journal.sqlite"), lambda task: task())
        world.keeping = Keeping(world.rows, 10, world.health, lambda: 0.0, world.files, journal)
        return journal

    journal = started()
    world.keeping.keep("doc", 0, 2, [1, 2])
    world.keeping.keep("doc", 1, 2, [3])
    world.keeping.keep("gone", 0, 1, [1])
    world.keeping.keep("cut anew", 0, 1, [1])
    world.keeping.keep("cut anew", 1, 2, [2])
    world.stored(1, 2, 3)
    world.keeping.release(["gone"])
    journal.close()
    journal = started()
    assert world.keeping.held() == {"doc": "disk"}
    journal.close()
    assert GroupJournal(str(tmp_path / "journal.sqlite"), lambda task: task()).at_start() == [
        GroupPart("doc", 0, 2, [key(1), key(2)]),
        GroupPart("doc", 1, 2, [key(3)]),
    ]
