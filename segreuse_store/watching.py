# SPDX-License-Identifier: Apache-2.0
"""A thread that looks what other engines have done with a store of files."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator

from segreuse_store.database import RecordChanges

logger = logging.getLogger("vllm.segreuse")

LOOK_S = 0.1
"""Time between two looks: so much later are records found that another engine has written."""
CLEAN_LOOKS = 50
"""Files that a dead engine has left are looked for in every so many looks."""


class Watcher:
    """One per engine; what it finds is taken by the owner's thread, which never waits for it.

    Args:
        look: returns what has changed; may raise.
        clean: removes what dead engines have left; may raise.
        look_s: seconds between two looks.
    """

    def __init__(
        self, look: Callable[[], RecordChanges], clean: Callable[[], None], look_s: float = LOOK_S
    ) -> None:
        self._look = look
        self._clean = clean
        self._look_s = look_s
        self._found: queue.SimpleQueue[RecordChanges] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._failed = False
        self._lock = threading.Lock()  # what was seen first is taken first
        # A daemon: it does not keep the process from ending while a file system hangs.
        self._thread = threading.Thread(target=self._work, name="segreuse-tier-watch", daemon=True)
        self._thread.start()

    def found(self) -> Iterator[RecordChanges]:
        """What has changed since the last call, in order."""
        while not self._found.empty():
            yield self._found.get()

    def look(self) -> None:
        """Look now; from any thread that may wait."""
        with self._lock:
            changes = self._look()
            if changes.gone or changes.coming or changes.all is not None:
                self._found.put(changes)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread; returns whether it has ended in time."""
        self._stopped.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        looks = 0
        while not self._stopped.wait(self._look_s):
            try:
                if looks % CLEAN_LOOKS == 0:
                    self._clean()
                self.look()
            except Exception as error:
                if not self._failed:  # once, not ten times a second
                    logger.warning("segment reuse: what other engines store is not seen: %s", error)
                self._failed = True
            else:
                self._failed = False
            looks += 1
