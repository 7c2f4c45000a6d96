# SPDX-License-Identifier: Apache-2.0
"""Which engines use a store: each has a lease, which is a file that it keeps locked.

    STORE/opening              locked while an engine opens or cleans up
    STORE/users                locked by all engines that use the store, together
    STORE/engines/LEASE.lock   locked by the engine of the lease; holds the path of its manifest
    STORE/engines/LEASE.sqlite which records its groups have (`journal.py`)

A lease outlives its engine: the next start of the same server, with the same manifest, gets it
again. Locks end with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from segreuse_store.disk import Disk
from segreuse_store.sqlite import FILES

_MOST_LEASES = 64
_LOCK = ".lock"
_OURS = re.compile(r"[0-9a-f]{16}-\d+\.lock")
_WAIT_S = 60.0
_POLL_S = 0.02


class Owner(NamedTuple):
    """Who an engine is.

    Attributes:
        manifest: path of the file that says what its groups of records are for; None: there is
            none. While it exists, what the engine holds is kept for its next start.
        rank: its number among the engines of its server.
    """

    manifest: str | None = None
    rank: int = 0

    @property
    def name(self) -> str:
        """A name for it, equal after a restart."""
        manifest = "" if self.manifest is None else os.path.abspath(self.manifest)
        return hashlib.blake2b(f"{self.rank}\0{manifest}".encode(), digest_size=8).hexdigest()


class Leases:
    """The lease of one engine, and whether those of others have expired.

    Attributes:
        name: of the lease.
        alone: whether no other engine used the store when this one came.
    """

    name: str
    alone: bool

    def __init__(self, store: str, owner: Owner, disk: Disk) -> None:
        """Nothing is locked before `opening`.

        Args:
            store: folder of the store.
            owner: who takes a lease.
            disk: the system calls.
        """
        self._store = store
        self._folder = os.path.join(store, "engines")
        self._owner = owner
        self._disk = disk
        self._held: list[int] = []

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Takes a lease. No other engine opens the store, or looks at leases, meanwhile.

        Raises:
            OSError: that cannot be done.
        """
        self._disk.make_folder(self._folder)
        with self._exclusively(_WAIT_S) as is_first:
            if not is_first:
                raise OSError(f"{self._store} is being opened by another engine for {_WAIT_S:g} s")
            try:
                self._acquire()
                yield
            except BaseException:
                self.close()
                raise

    def _acquire(self) -> None:
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
        for number in range(_MOST_LEASES):
            name = f"{self._owner.name}-{number}"
            lease = self._disk.lock(self._lock_of(name))
            if lease is not None:
                self._held.append(lease)
                self.name = name
                # Others look for it, in folders of their own.
                manifest = os.path.abspath(self._owner.manifest) if self._owner.manifest else ""
                self._disk.replace(lease, manifest.encode())
                return
        raise OSError(f"all {_MOST_LEASES} leases of {self._store} are held by other engines")

    def _lock_of(self, lease: str) -> str:
        return os.path.join(self._folder, lease + _LOCK)

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
        """Path of the engine's journal."""
        return os.path.join(self._folder, self.name + ".sqlite")

    def expired(self, leases: set[str]) -> set[str]:
        """Those of other leases that no engine has; none while an engine opens the store."""
        with self._exclusively(0.0) as is_first:
            return {lease for lease in leases if self._is_free(lease)} if is_first else set()

    def _is_free(self, lease: str) -> bool:
        if lease == self.name:
            return False
        lock = self._disk.lock(self._lock_of(lease))
        if lock is None:
            return False
        os.close(lock)
        return True

    def remove_expired(self, release: Callable[[str], None]) -> None:
        """Removes leases that no engine has, and whose manifests are no more: what they hold will
        not be asked for again. To be called within `opening`.

        Args:
            release: called with the name of each, before it is removed.
        """
        for file in os.listdir(self._folder):
            lease = file.removesuffix(_LOCK)
            if not _OURS.fullmatch(file) or not self._is_free(lease):
                continue
            with open(os.path.join(self._folder, file), errors="replace") as opened:
                manifest = opened.read()
            if manifest and (os.path.exists(manifest) or not os.path.isabs(manifest)):
                continue
            release(lease)
            for suffix in [".sqlite" + it for it in FILES] + [_LOCK]:
                self._disk.remove(os.path.join(self._folder, lease + suffix))

    def close(self) -> None:
        """The engine uses the store no more."""
        while self._held:
            os.close(self._held.pop())
