# SPDX-License-Identifier: Apache-2.0
"""An alarm rings once it is so late, and may be put off until then."""

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from segreuse_extras.healing import alarm as alarm_module
from segreuse_extras.healing.alarm import Alarm

WAIT_S = 60


class Sleeper:
    """A clock that stands still but while somebody sleeps, and lets nobody sleep unseen."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = SimpleQueue[float]()
        self._over = SimpleQueue[None]()

    def sleep(self, seconds: float) -> None:
        self.sleeps.put(seconds)
        self._over.get(timeout=WAIT_S)
        self.now += seconds

    def end(self) -> None:
        self._over.put(None)


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    sleeper = Sleeper()
    monkeypatch.setattr(alarm_module, "time", SimpleNamespace(sleep=sleeper.sleep))
    return sleeper


@pytest.mark.parametrize(("then", "more"), [(108.0, 3.0), (101.0, None)])
def test_it_rings_once_however_it_was_set(
    sleeper: Sleeper, then: float, more: float | None
) -> None:
    rings, alarm = SimpleQueue[float](), Alarm(lambda: sleeper.now)
    for _ in range(2):  # it can be set again once it has rung
        sleeper.now = 100.0
        alarm.set(105.0, lambda: rings.put(sleeper.now))
        assert sleeper.sleeps.get(timeout=WAIT_S) == 5.0
        alarm.set(then, lambda: rings.put(0.0))
        sleeper.end()
        if more is not None:
            assert sleeper.sleeps.get(timeout=WAIT_S) == more
            sleeper.end()
        assert rings.get(timeout=WAIT_S) == max(105.0, then)
    assert rings.empty()


def test_what_is_over_rings_at_once_and_keeps_no_process_alive(sleeper: Sleeper) -> None:
    rung, threads = threading.Event(), list[threading.Thread]()

    def wake() -> None:
        threads.append(threading.current_thread())
        rung.set()

    Alarm(lambda: sleeper.now).set(100.0, wake)
    assert rung.wait(WAIT_S)
    assert threads[0].daemon
    assert sleeper.sleeps.empty()
