# SPDX-License-Identifier: Apache-2.0
"""Which records a store is erasing, and which it could not erase and tries again.

begin ──► erase, in a thread ──► finished
            │         ▲
            ▼         │ again, in the watcher's thread: an idle engine has no steps
       could not be erased ──► wanted_again: it stays
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from segreuse_store.folder import RecordFolder

logger = logging.getLogger("vllm.segreuse")

Erased = tuple[Sequence[bytes], list[str]]
"""Keys, and names of the files that were removed."""


class Erasures:
    """One per store. `erase` and `again` are for threads that may wait, the rest is for the
    owner's. The lock is never held while the file system works.

    Args:
        folder: whose records are erased.
    """

    def __init__(self, folder: RecordFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._under_way: Counter[bytes] = Counter()
        self._left: set[bytes] = set()
        self._finished: queue.SimpleQueue[Erased] = queue.SimpleQueue()

    def __contains__(self, key: object) -> bool:
        """Whether a record is being erased, or is to be."""
        return key in self._under_way or key in self._left

    def begin(self, keys: Collection[bytes]) -> None:
        """`erase` is called with them next."""
        with self._lock:
            self._under_way.update(keys)

    def erase(self, keys: Sequence[bytes]) -> None:
        """Erase records that were begun."""
        if error := self._try(keys):
            logger.warning(
                "segment reuse: %d erased records are still on disk, it is tried again: %s",
                len(keys),
                error,
            )

    def again(self) -> None:
        """Try again what could not be erased."""
        with self._lock:  # in this order: `in` takes no lock
            keys = [*self._left]
            self._under_way.update(keys)
            self._left.clear()
        if keys:
            self._try(keys)

    def _try(self, keys: Sequence[bytes]) -> Exception | None:
        try:
            names = self._folder.release(keys)
        except Exception as error:
            with self._lock:
                self._left.update(keys)
                self._under_way -= Counter(keys)
            return error
        self._finished.put((keys, names))
        return None

    def wanted_again(self, keys: Collection[bytes]) -> set[bytes]:
        """Records are not to be erased; returns those that are not: the others are being erased
        already."""
        with self._lock:
            kept = self._left.intersection(keys)
            self._left -= kept
        return kept

    def finished(self) -> Iterator[Erased]:
        """What was erased since the last call."""
        while not self._finished.empty():
            keys, names = self._finished.get()
            with self._lock:
                self._under_way -= Counter(keys)
            yield keys, names
