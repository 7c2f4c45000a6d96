# SPDX-License-Identifier: Apache-2.0
"""The system calls of the store, each a method: tests replace them by calls that fail or hang.

Everything is made for its owner alone (0600, folders 0700), whatever the process's umask. Python
closes all descriptors where another program is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FILE = 0o600
_FOLDER = 0o700


class Disk:
    """The file system."""

    def make_folder(self, path: str) -> None:
        """A folder, with those above it, unless it is there."""
        if not os.path.isdir(path):
            if parent := os.path.dirname(path):
                self.make_folder(parent)
            with contextlib.suppress(FileExistsError):  # another engine was faster
                os.mkdir(path, _FOLDER)

    def lock(self, path: str, shared: bool = False) -> int | None:
        """Locks a file until the descriptor is closed or the process ends; None: it is locked.

        Args:
            path: of the file, made if need be.
            shared: together with others that do so.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, _FILE)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            return None
        return descriptor

    def share(self, lock: int) -> None:
        """Others may have the lock, too, if they share it."""
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def replace(self, descriptor: int, content: bytes) -> None:
        """Writes the whole content of a small file; equal content is there at any time."""
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Writes a new file and waits until the device has it."""
        descriptor = self.create(path)
        try:
            for part in parts:
                rest = memoryview(part).cast("B")
                while rest:
                    rest = rest[self.append(descriptor, rest) :]
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def create(self, path: str) -> int:
        """Descriptor of a new file."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE)

    def append(self, descriptor: int, data: memoryview) -> int:
        """Bytes that were written; `data` may be cut."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Waits until the device has the file."""
        os.fsync(descriptor)

    def sync_folder(self, path: str) -> None:
        """Waits until the device has the folder's names."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: str, into: memoryview) -> int:
        """Reads a file from its beginning; returns how many bytes it has, up to `len(into)`."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < len(into) and (count := os.readv(descriptor, [into[done:]])):
                done += count
            return done
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sizes(self, path: str) -> Iterator[tuple[str, int]]:
        """(`folder/name`, bytes) of the files in the folders of a folder."""
        with os.scandir(path) as folders:
            for folder in folders:
                with os.scandir(folder.path) as files:
                    for file in files:
                        yield f"{folder.name}/{file.name}", file.stat(follow_symlinks=False).st_size
