# SPDX-License-Identifier: Apache-2.0
"""Namespaces: KV is reused only between requests whose namespaces are equal, byte for byte."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_SECRET = secrets.token_bytes(32)
_LOOKED_AT = 2


def namespace_key(
    extra_keys: tuple[str, ...],
    cache_salt: str | None,
    lora: tuple[str, str] | None,
    mm_hashes: tuple[str, ...],
) -> bytes:
    """Everything that separates one request's KV from another's, as one canonical string.

    Each field is written as a tag, its number of items, and each item behind its length in bytes,
    so different fields never give the same key. Absent and empty are different, and so is the
    order of keys. Text is UTF-8 as it came: NFC and NFD spellings stay distinct.

    Args:
        extra_keys: the request's keys, in order.
        cache_salt: vLLM's own salt.
        lora: name and version (or path) of the adapter.
        mm_hashes: vLLM's hashes of the multimodal inputs, in order.

    Raises:
        ValueError: a string cannot be written as UTF-8 (a lone surrogate).
    """
    salt = () if cache_salt is None else (cache_salt,)
    return b"".join(
        (
            _field(b"K", extra_keys),
            _field(b"S", salt),
            _field(b"L", lora or ()),
            _field(b"M", mm_hashes),
        )
    )


def _field(tag: bytes, items: tuple[str, ...]) -> bytes:
    encoded = [item.encode() for item in items]
    sized = [len(item).to_bytes(4, "big") + item for item in encoded]
    return tag + len(sized).to_bytes(4, "big") + b"".join(sized)


def owner_of(key: bytes) -> bytes:
    """Whose a namespace is: its first extra key. That is what rights are about, and where names are
    bound to API keys, the caller's where the name is the caller's own (`config.bind_extra_keys`).

    Args:
        key: of the namespace.
    """
    size = int.from_bytes(key[5:9])
    return key[9 : 9 + size]


def has_lora(key: bytes) -> bool:
    """Whether the requests of a namespace have a LoRA adapter.

    Args:
        key: of the namespace.
    """
    at = 0
    while key[at : at + 1] != b"L":
        items, at = int.from_bytes(key[at + 1 : at + 5]), at + 5
        for _ in range(items):
            at += 4 + int.from_bytes(key[at : at + 4])
    return any(key[at + 1 : at + 5])


class NamespaceTable:
    """Interns namespace keys as small integers, and forgets the ones nobody uses.

    A namespace stays while a request refers to it or a block of it is indexed. Only a namespace
    with neither gives its id back, so an id never means two namespaces at once.
    """

    def __init__(self, is_indexed: Callable[[int], bool] = lambda namespace: True) -> None:
        """Start empty.

        Args:
            is_indexed: whether an index still holds blocks of a namespace; pass
                `lambda namespace: index.population(namespace) > 0`. Without it nothing is ever
                forgotten: to give an id to another namespace while its blocks live would leak.
        """
        self._is_indexed = is_indexed
        self._ids: dict[bytes, int] = {}
        self._keys: list[bytes | None] = []  # by id; None: free
        self._digests: npt.NDArray[np.uint64] = np.zeros(64, np.uint64)  # by id
        self._references: list[int] = []  # by id
        self._free: list[int] = []
        self._hand = -1

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_references(self) -> int:
        """References that are held, to all ids."""
        return sum(self._references)

    def find(self, key: bytes) -> int | None:
        """The id of a key, or None. Takes no reference."""
        return self._ids.get(key)

    def intern(self, key: bytes) -> int:
        """The id of a key, new if need be. Takes a reference: pair it with `release`."""
        namespace = self._ids.get(key)
        if namespace is None:
            namespace = self._new_id()
            self._ids[key] = namespace
            self._keys[namespace] = key
            digest = hashlib.blake2b(key, digest_size=8, key=_SECRET).digest()
            self._digests[namespace] = int.from_bytes(digest)
        self._references[namespace] += 1
        return namespace

    def key(self, namespace: int) -> bytes:
        """The key of an id that is in use.

        Raises:
            ValueError: the id is not in use.
        """
        self._check(namespace)
        key = self._keys[namespace]
        assert key is not None
        return key

    def digest(self, namespace: int) -> int:
        """64 bits that stand for the namespace's key as long as the process lives, also after its
        id was given to another; nobody else can compute them."""
        return int(self._digests[namespace])

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """`digest` of every id, uint64 `[ids or more]`; valid until a new id is given."""
        return self._digests

    def references(self) -> Counter[int]:
        """References by namespace, those above 0."""
        return +Counter(dict(enumerate(self._references)))

    def acquire(self, namespace: int) -> None:
        """Take one more reference to an id that the caller knows to be alive.

        Raises:
            ValueError: the id is not in use.
        """
        self._check(namespace)
        self._references[namespace] += 1

    def release(self, namespace: int) -> None:
        """Give a reference back. The id lives on while blocks of the namespace are indexed.

        Raises:
            ValueError: nobody holds a reference.
        """
        self._check(namespace)
        if not self._references[namespace]:
            raise ValueError(f"namespace {namespace} was released more often than acquired")
        self._references[namespace] -= 1
        if not self._references[namespace] and not self._is_indexed(namespace):
            self._drop(namespace)

    def _check(self, namespace: int) -> None:
        if not 0 <= namespace < len(self._keys) or self._keys[namespace] is None:
            raise ValueError(f"namespace {namespace} is not in use: intern its key first")

    def _new_id(self) -> int:
        # Blocks are evicted without telling this table, so idle ids are looked for, in turn: more
        # than one per new id, so that the table is no larger than twice what is in use.
        for _ in range(min(_LOOKED_AT, len(self._keys))):
            self._hand = namespace = (self._hand + 1) % len(self._keys)
            idle = self._keys[namespace] is not None and not self._references[namespace]
            if idle and not self._is_indexed(namespace):
                self._drop(namespace)
        if self._free:
            return self._free.pop()
        self._keys.append(None)
        if len(self._keys) > self._digests.size:
            self._digests = np.concatenate([self._digests, np.zeros_like(self._digests)])
        self._references.append(0)
        return len(self._keys) - 1

    def _drop(self, namespace: int) -> None:
        key = self._keys[namespace]
        assert key is not None
        del self._ids[key]
        self._keys[namespace] = None
        self._free.append(namespace)


class HeldNamespaces:
    """References of one holder, which can all be given back, also after an error in the middle of
    its work.

    Args:
        table: where they are counted.
    """

    def __init__(self, table: NamespaceTable) -> None:
        self._table = table
        self._counts: Counter[int] = Counter()

    def counts(self) -> Counter[int]:
        """References by namespace, those above 0."""
        return +self._counts

    def acquire(self, namespace: int) -> None:
        """See `NamespaceTable.acquire`."""
        self._table.acquire(namespace)
        self._counts[namespace] += 1

    def release(self, namespace: int) -> None:
        """Give one back.

        Raises:
            ValueError: the holder has none: another's would be given back.
        """
        if not self._counts[namespace]:
            raise ValueError(f"namespace {namespace} is not held: it was released before")
        # Counted first: after an error below, nobody knows whether the table has it still. One too
        # many there is memory; one too few would give an id in use to another namespace.
        self._counts[namespace] -= 1
        self._table.release(namespace)

    def release_all(self) -> None:
        """Give all of them back."""
        for namespace in self._counts:
            while self._counts[namespace]:
                self.release(namespace)
        self._counts.clear()
