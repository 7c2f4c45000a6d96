# SPDX-License-Identifier: Apache-2.0
"""What an engine of the fleet holds: whole components, in GPU memory and behind it in host memory.

As `segreuse_tools.estimate.block_cache` has it for blocks: a prompt has copies of its own of what
it reuses at another position, which nobody finds again; what was used last longest ago goes first,
and of one prompt the end first. Evicted components that can be found again go to host memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.fleet.traffic import FleetRequest
from segreuse_tools.estimate.gain import LOST_TOKENS


class Holders:
    """Which engines hold something: a bit for each.

    Args:
        engines: how many there are.
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._bytes = -(-engines // 8)
        self._masks: dict[int, int] = {}

    def add(self, key: int, engine: int) -> None:
        """An engine holds it from now on."""
        self._masks[key] = self._masks.get(key, 0) | 1 << engine

    def drop(self, key: int, engine: int) -> None:
        """An engine, which held it, does no more."""
        mask = self._masks[key] & ~(1 << engine)
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]

    def mask(self, key: int) -> int:
        """Bits of those that hold it."""
        return self._masks.get(key, 0)

    def tokens_held(self, masks: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        """Sum of the tokens of the masks that an engine is in, int64 `[engines]`."""
        raw = b"".join(mask.to_bytes(self._bytes, "little") for mask in masks)
        rows = np.frombuffer(raw, np.uint8).reshape(len(masks), self._bytes)
        bits = np.unpackbits(rows, axis=1, count=self._engines, bitorder="little")
        return np.asarray(np.asarray(tokens, np.int64) @ bits)


class Known(NamedTuple):
    """What an engine knows of a prompt; its other tokens are computed.

    Attributes:
        prefix_tokens: by prefix caching.
        segments: bool of each part: known at another position.
        segment_tokens: of these, without those lost at their ends.
        host_tokens, remote_tokens: of all known ones, those that come from host memory and from
            another engine.
        fits: whether the cache has room for the request at all.
    """

    prefix_tokens: int = 0
    segments: tuple[bool, ...] = ()
    segment_tokens: int = 0
    host_tokens: int = 0
    remote_tokens: int = 0
    fits: bool = True


class _Held(NamedTuple):
    """Tokens, and of which part they are; None: of nothing that segments are taken from."""

    tokens: int
    id: int | None


class EngineCache:
    """One engine's.

    Args:
        engine: its number.
        capacity: tokens in GPU memory, and in host memory.
        least_tokens: of segments that are reused; None: none are, only prefixes.
        by_name, by_id: told what it holds; shared by the fleet.
        is_remote: what others hold is fetched.

    Attributes:
        used: tokens in GPU memory, and in host memory.
    """

    def __init__(
        self,
        engine: int,
        capacity: tuple[int, int],
        least_tokens: int | None,
        holders: tuple[Holders, Holders],
        is_remote: bool = False,
    ) -> None:
        self._engine = engine
        self.capacity = capacity
        self._least = least_tokens
        self._by_name, self._by_id = holders
        self._is_remote = is_remote
        self._held: tuple[OrderedDict[Hashable, _Held], ...] = (OrderedDict(), OrderedDict())
        self._donors: dict[int, Hashable] = {}
        self.used = [0, 0]

    def run(self, request: FleetRequest) -> Known:
        """Look a prompt up, compute it, and hold it until it is evicted."""
        if request.tokens + request.answer_tokens > self.capacity[0]:
            return Known(fits=False)
        known, sources = self._known(request)
        for number in sorted(sources, reverse=True):
            self._use(*sources[number])
        prefix_parts = self._prefix_parts(request, known)
        lengths = [part.tokens for part in request.parts]
        copied = sum(n for n, it in zip(lengths, known.segments, strict=True) if it)
        self._put(object(), _Held(copied + request.answer_tokens, None))
        for at in reversed(range(len(lengths))):
            id = None if self._least is None else request.ids[at]
            if at < prefix_parts or not any(known.segments):
                self._use(request.names[at], _Held(lengths[at], id))
            elif not known.segments[at]:
                self._use(object(), _Held(lengths[at], id))
        self._evict()
        return known

    def _prefix_parts(self, request: FleetRequest, known: Known) -> int:
        tokens = count = 0
        for part in request.parts:
            tokens += part.tokens
            # The last token is always computed, and known all the same.
            if tokens > known.prefix_tokens + (tokens == request.tokens):
                break
            count += 1
        return count

    def _known(self, request: FleetRequest) -> tuple[Known, dict[int, tuple[Hashable, _Held]]]:
        """What is known, and what segments are copied from, by the part."""
        from_host = from_others = prefix = at = 0
        parts = request.parts
        for at, name in enumerate(request.names):
            where = self._where(name, self._by_name)
            if where is None:
                break
            prefix += parts[at].tokens
            from_host += parts[at].tokens * (where == 1)
            from_others += parts[at].tokens * (where == 2)
        else:
            at = len(parts)
        prefix = min(prefix, request.tokens - 1)
        nothing = Known(prefix, (False,) * len(parts), 0, from_host, from_others)
        if self._least is None or at == len(parts):
            return nothing, {}
        segments, sources, total = [False] * len(parts), {}, 0
        for number in range(at, len(parts)):
            found = self._donor(request.ids[number])
            tokens = parts[number].tokens - LOST_TOKENS
            if found is None or tokens <= 0:
                continue
            key, where = found
            segments[number] = True
            sources[number] = key, _Held(parts[number].tokens, request.ids[number])
            total += tokens
            from_host += tokens * (where == 1)
            from_others += tokens * (where == 2)
        if total < self._least:
            return nothing, {}
        return Known(prefix, tuple(segments), total, from_host, from_others), sources

    def _where(self, name: int, holders: Holders) -> int | None:
        """0: in GPU memory, 1: in host memory, 2: at another engine."""
        if name in self._held[0]:
            return 0
        if name in self._held[1]:
            return 1
        return 2 if self._is_remote and holders.mask(name) else None

    def _donor(self, id: int) -> tuple[Hashable, int] | None:
        key = self._donors.get(id)
        if key is None:
            # What is fetched is held from then on.
            return (object(), 2) if self._is_remote and self._by_id.mask(id) else None
        return key, 0 if key in self._held[0] else 1

    def _use(self, key: Hashable, held: _Held) -> None:
        """It is in GPU memory from now on, and was used last."""
        if key in self._held[0]:
            self._held[0].move_to_end(key)
            return
        if key in self._held[1]:
            self.used[1] -= self._held[1].pop(key).tokens
        elif isinstance(key, int):
            self._by_name.add(key, self._engine)
        if held.id is not None and self._donors.get(held.id) != key:
            self._donors[held.id] = key
            self._by_id.add(held.id, self._engine)
        self._put(key, held)

    def _put(self, key: Hashable, held: _Held) -> None:
        self._held[0][key] = held
        self.used[0] += held.tokens

    def _evict(self) -> None:
        gpu, host = self._held
        while self.used[0] > self.capacity[0]:
            key, held = gpu.popitem(last=False)
            self.used[0] -= held.tokens
            if self.capacity[1] and (isinstance(key, int) or self._is_donor(key, held)):
                host[key] = held
                self.used[1] += held.tokens
            else:
                self._forget(key, held)
        while self.used[1] > self.capacity[1]:
            key, held = host.popitem(last=False)
            self.used[1] -= held.tokens
            self._forget(key, held)

    def _is_donor(self, key: Hashable, held: _Held) -> bool:
        return held.id is not None and self._donors.get(held.id) == key

    def _forget(self, key: Hashable, held: _Held) -> None:
        if isinstance(key, int):
            self._by_name.drop(key, self._engine)
        if held.id is not None and self._is_donor(key, held):
            del self._donors[held.id]
            self._by_id.drop(held.id, self._engine)

    def clear(self) -> None:
        """The engine is gone, and with it what it held."""
        for held in self._held:
            while held:
                self._forget(*held.popitem())
        self.used = [0, 0]
