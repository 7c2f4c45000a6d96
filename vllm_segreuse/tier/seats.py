# SPDX-License-Identifier: Apache-2.0
"""Which engines use a store: each has a seat, which is a file that it keeps locked.

    STORE/opening             locked while an engine opens or cleans up
    STORE/users               locked by all engines that use the store, together
    STORE/engines/SEAT.lock   locked by the engine of the seat; holds the path of its manifest
    STORE/engines/SEAT.sqlite which records its documents have (`journal.py`)

A seat outlives its engine: the next start of the same server, with the same manifest of knowledge
bases, gets it again. Locks end with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm_segreuse.tier.disk import Disk
from vllm_segreuse.tier.sqlite import FILES

_MOST_SEATS = 64
_LOCK = ".lock"
_OURS = re.compile(r"[0-9a-f]{16}-\d+\.lock")
_WAIT_S = 60.0
_POLL_S = 0.02


class Owner(NamedTuple):
    """Who an engine is.

    Attributes:
        manifest: path of the manifest of its knowledge bases; None: there is none.
        rank: its number among the engines of its server.
    """

    manifest: str | None = None
    rank: int = 0

    @property
    def name(self) -> str:
        """A name for it, equal after a restart."""
        manifest = "" if self.manifest is None else os.path.abspath(self.manifest)
        return hashlib.blake2b(f"{self.rank}\0{manifest}".encode(), digest_size=8).hexdigest()


class Seats:
    """The seat of one engine, and whether others are taken.

    Attributes:
        name: of the seat.
        alone: whether no other engine used the store when this one came.
    """

    name: str
    alone: bool

    def __init__(self, store: str, owner: Owner, disk: Disk) -> None:
        """Nothing is locked before `opening`.

        Args:
            store: folder of the store.
            owner: whose seat is taken.
            disk: the system calls.
        """
        self._store = store
        self._folder = os.path.join(store, "engines")
        self._owner = owner
        self._disk = disk
        self._held: list[int] = []

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Takes a seat. No other engine opens the store, or looks at seats, meanwhile.

        Raises:
            OSError: that cannot be done.
        """
        self._disk.make_folder(self._folder)
        with self._exclusively(_WAIT_S) as is_first:
            if not is_first:
                raise OSError(f"{self._store} is being opened by another engine for {_WAIT_S:g} s")
            try:
                self._sit_down()
                yield
            except BaseException:
                self.leave()
                raise

    def _sit_down(self) -> None:
        users = os.path.join(self._store, "users")
        lock = self._disk.lock(users)
        self.alone = lock is not None
        if lock is None:
            lock = self._disk.lock(users, shared=True)
        else:
            self._disk.share(lock)
        if lock is None:
            raise OSError(f"{users} is locked by another process")
        self._held.append(lock)
        for number in range(_MOST_SEATS):
            name = f"{self._owner.name}-{number}"
            seat = self._disk.lock(self._lock_of(name))
            if seat is not None:
                self._held.append(seat)
                self.name = name
                # Others look for it, in folders of their own.
                manifest = os.path.abspath(self._owner.manifest) if self._owner.manifest else ""
                self._disk.replace(seat, manifest.encode())
                return
        raise OSError(f"all {_MOST_SEATS} seats of {self._store} are taken by other engines")

    def _lock_of(self, seat: str) -> str:
        return os.path.join(self._folder, seat + _LOCK)

    @contextlib.contextmanager
    def _exclusively(self, wait_s: float) -> Iterator[bool]:
        path = os.path.join(self._store, "opening")
        until = time.monotonic() + wait_s
        while (lock := self._disk.lock(path)) is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                os.close(lock)

    def journal(self) -> str:
        """Path of the engine's journal of documents."""
        return os.path.join(self._folder, self.name + ".sqlite")

    def stopped(self, seats: set[str]) -> set[str]:
        """Those of other seats that no engine has; none while an engine opens the store."""
        with self._exclusively(0.0) as is_first:
            return {seat for seat in seats if self._is_free(seat)} if is_first else set()

    def _is_free(self, seat: str) -> bool:
        if seat == self.name:
            return False
        lock = self._disk.lock(self._lock_of(seat))
        if lock is None:
            return False
        os.close(lock)
        return True

    def clear(self, dismiss: Callable[[str], None]) -> None:
        """Removes seats that no engine has, and whose manifests are no more: their documents will
        not be asked for again. To be called within `opening`.

        Args:
            dismiss: called with the name of each, before it is removed.
        """
        for file in os.listdir(self._folder):
            seat = file.removesuffix(_LOCK)
            if not _OURS.fullmatch(file) or not self._is_free(seat):
                continue
            with open(os.path.join(self._folder, file), errors="replace") as opened:
                manifest = opened.read()
            if manifest and (os.path.exists(manifest) or not os.path.isabs(manifest)):
                continue
            dismiss(seat)
            for suffix in (*(".sqlite" + it for it in FILES), _LOCK):
                self._disk.remove(os.path.join(self._folder, seat + suffix))

    def leave(self) -> None:
        """The engine uses the store no more."""
        while self._held:
            os.close(self._held.pop())
