# SPDX-License-Identifier: Apache-2.0
"""What files keep of a record: as it was written by every version before, and read again."""

import struct

import numpy as np
import pytest

from segreuse_store import StoredRecord
from segreuse_store.format import HEAD_BYTES, Sealed
from segreuse_store.sealing import Checksum
from vllm_segreuse.features.tier.record import About, namespaces_of, packed, unpacked

TOKENS = np.array([5, -1, 2**31 - 1], np.int32)
ALICE, BOB = b"a" * 16, b"b" * 16
PARENT = bytes(range(32))


@pytest.mark.parametrize("namespaces", [[], [ALICE], [ALICE, BOB]])
@pytest.mark.parametrize("parent", [None, PARENT])
def test_what_is_packed_is_unpacked(parent: bytes | None, namespaces: list[bytes]) -> None:
    content = packed(About(TOKENS, -7, 3, parent), namespaces)
    found = unpacked(content)
    assert found[1:] == (-7, 3, parent)
    np.testing.assert_array_equal(found.tokens, TOKENS)
    assert namespaces_of(content) == namespaces


def test_stores_of_earlier_versions_can_be_read() -> None:
    """The bytes of a row, and of the header of its file."""
    key = bytes(range(100, 132))
    content = packed(About(TOKENS, 64, 2, PARENT), [ALICE, BOB])
    row = struct.pack("<32sqIIHB", key, 64, 2, 3, 2, True) + PARENT + ALICE + BOB
    assert key + content == row + TOKENS.astype("<i4").tobytes()
    header = Sealed(b"f" * 32, b"k" * 32, Checksum(), kind=2).header(StoredRecord(key, content), 99)
    about = struct.Struct("<8sHBB32s32sqIQ4x").unpack(header)
    assert about[:4] == (b"SEGREUSE", 1, 2, 0)
    assert about[5:] == (b"f" * 32, 64, 2, 99)
    assert about[4] not in (key, bytes(32))
    assert content[:HEAD_BYTES] == struct.pack("<qI", 64, 2)
