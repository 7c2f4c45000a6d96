# SPDX-License-Identifier: Apache-2.0
"""Leave the code of other GPUs out of a library, so that it compresses to what one GPU needs.

A library holds containers ("fat binaries"), one for each file that nvcc compiled; a container holds
the same kernels for several architectures, as machine code or PTX. Layout, little-endian:

    container  magic u32, version u16, header bytes u16, bytes of all entries u64
    entry      kind u16 (1 PTX, 2 machine code), version u16, header bytes u32, payload bytes u64,
               ..., architecture u32 at byte 28

A container becomes shorter in place and zeros follow it: nothing else in the library moves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
MACHINE_CODE = 2
_CONTAINER = struct.Struct("<4sHHQ")
_ENTRY = struct.Struct("<HHIQ")
_ARCHITECTURE = 28


class Container(NamedTuple):
    """Where one lies: its first byte, its header's and its entries' bytes."""

    start: int
    header: int
    size: int

    @property
    def end(self) -> int:
        """The byte behind its last entry."""
        return self.start + self.header + self.size


class Entry(NamedTuple):
    """The kernels of a container for one architecture."""

    kind: int
    architecture: int
    start: int
    end: int


def containers(library: bytes | bytearray) -> Iterator[Container]:
    """All containers of a library, in their order."""
    at = library.find(MAGIC)
    while at >= 0:
        _, version, header, size = _CONTAINER.unpack_from(library, at)
        found = Container(at, header, size)
        if version == 1 and header == _CONTAINER.size and found.end <= len(library):
            yield found
            at = library.find(MAGIC, found.end)
        else:  # four bytes that happen to be the same
            at = library.find(MAGIC, at + 1)


def entries(library: bytes | bytearray, container: Container) -> Iterator[Entry]:
    """What a container holds.

    Raises:
        ValueError: its entries do not fill it, so it is not laid out as this module knows.
    """
    at = container.start + container.header
    while at < container.end:
        kind, _, header, size = _ENTRY.unpack_from(library, at)
        end = at + header + size
        if header <= _ARCHITECTURE or end > container.end:
            raise ValueError(f"the fat binary at byte {container.start} cannot be read")
        (architecture,) = struct.unpack_from("<I", library, at + _ARCHITECTURE)
        yield Entry(kind, architecture, at, end)
        at = end


def only(library: bytes, architecture: int) -> bytes:
    """The library with machine code of one architecture (90 for sm_90) and nothing else.

    A container without any keeps its smallest entry, so that it can still be registered; its
    kernels will not run. In vLLM 0.32 those are products with quantised weights.
    """
    shorter = bytearray(library)
    for container in containers(library):
        held = list(entries(library, container))
        kept = [it for it in held if (it.kind, it.architecture) == (MACHINE_CODE, architecture)]
        kept = kept or sorted(held, key=lambda it: it.end - it.start)[:1]
        body = b"".join(library[entry.start : entry.end] for entry in kept)
        first = container.start + container.header
        shorter[first : container.end] = body.ljust(container.size, b"\0")
        shorter[container.start : first] = _CONTAINER.pack(MAGIC, 1, container.header, len(body))
    return bytes(shorter)
