# SPDX-License-Identifier: Apache-2.0
"""What wakes an engine that sleeps, at a time that may be put off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Alarm:
    """One per engine.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._when_s = -float("inf")
        self._is_set = False

    def set(self, when_s: float, wake: Callable[[], None]) -> None:
        """Call `wake`, which any thread may call, once it is so late.

        An alarm that is set already is put off, or comes when it was to come before.
        """
        with self._lock:
            self._when_s = when_s
            if not self._is_set:
                self._is_set = True
                # A daemon: an engine ends without it.
                threading.Thread(target=self._wait, args=(wake,), daemon=True).start()

    def _wait(self, wake: Callable[[], None]) -> None:
        while (rest_s := self._rest_s()) > 0:
            time.sleep(rest_s)
        wake()

    def _rest_s(self) -> float:
        with self._lock:
            rest_s = self._when_s - self._clock()
            self._is_set = rest_s > 0
            return rest_s
