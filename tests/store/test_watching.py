# SPDX-License-Identifier: Apache-2.0
"""The thread that looks what other engines do: in order, for ever, and quiet when it cannot."""

import threading
import time
from collections.abc import Callable

import pytest

from segreuse_store.database import RecordChanges
from segreuse_store.watching import Watcher
from tests.store.records import record

NOTHING = RecordChanges([], [])


def wait_for(event: threading.Event) -> None:
    assert event.wait(30)


def after(calls: int) -> tuple[threading.Event, Callable[[], None]]:
    """An event that so many calls set."""
    event, left = threading.Event(), [calls]

    def count() -> None:
        left[0] -= 1
        if left[0] <= 0:
            event.set()

    return event, count


def test_it_looks_again_and_again_and_cleans_up() -> None:
    looked, count = after(3)
    cleaned, count_cleaned = after(2)

    def look() -> RecordChanges:
        count()
        return RecordChanges(["gone"], []) if not looked.is_set() else NOTHING

    watcher = Watcher(look, count_cleaned, look_s=0.001)
    wait_for(looked)
    wait_for(cleaned)
    assert watcher.stop(30)
    assert [changes.gone for changes in watcher.found()] == [["gone"]] * 2
    assert [*watcher.found()] == []


def test_it_cleans_up_before_the_first_look_and_before_each_fiftieth_behind_it() -> None:
    done: list[str] = []
    looked, count = after(101)

    def look() -> RecordChanges:
        done.append("look")
        count()
        return NOTHING

    watcher = Watcher(look, lambda: done.append("clean"), look_s=0.0001)
    wait_for(looked)
    assert watcher.stop(30)
    fifty = ["clean", *["look"] * 50]
    assert done[:103] == [*fifty, *fifty, "clean"]
    assert [*watcher.found()] == [], "nothing has changed"


@pytest.mark.parametrize(
    "changes",
    [
        RecordChanges(["gone"], []),
        RecordChanges([], [record(1)]),
        RecordChanges([], [], all=frozenset()),
    ],
)
def test_any_change_is_found(changes: RecordChanges) -> None:
    watcher = Watcher(lambda: changes, lambda: None, look_s=60)
    watcher.look()
    assert [*watcher.found()] == [changes]
    assert watcher.stop(30)


def test_what_fails_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    works = threading.Event()
    failed, count = after(5)

    def look() -> RecordChanges:
        if not works.is_set():
            count()
            raise OSError("made by the test")
        return RecordChanges(["gone"], [])

    with caplog.at_level("WARNING", "vllm.segreuse"):
        watcher = Watcher(look, lambda: None, look_s=0.001)
        wait_for(failed)
        assert caplog.text.count("what other engines store is not seen: made by the test") == 1
    works.set()
    found: list[RecordChanges] = []
    while not found:
        found += watcher.found()
        time.sleep(0.001)
    assert watcher.stop(30)


def test_the_end_waits_for_no_file_system_that_hangs() -> None:
    hangs, reached = threading.Event(), threading.Event()

    def look() -> RecordChanges:
        reached.set()
        hangs.wait(60)
        return NOTHING

    watcher = Watcher(look, lambda: None, look_s=0.001)
    wait_for(reached)
    assert not watcher.stop(0.01)
    hangs.set()
    assert watcher.stop(30)
