# SPDX-License-Identifier: Apache-2.0
"""What an engine's KV cache of blocks knows, one request after the other, without the engine.

As vLLM has it: full blocks with chained names are found as a prefix; what was used last longest ago
is evicted first, and of one prompt the end first. And as this plugin has it: segments are found by
its own index, at any offset, and copied, so that each prompt has blocks of its own; blocks with
copied tokens have no exact names, and donate only where every token of them was computed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from segreuse_tools.estimate.work_left import Left, Planned, PolicyWork
from vllm_segreuse.cache.contexts import compared
from vllm_segreuse.cache.index import BlockFacts, SegmentIndex
from vllm_segreuse.cache.matcher import find_matches
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.cache.rolling_hash import HashArray, window_hashes
from vllm_segreuse.plan import IntArray

_ODD = 0x9E3779B97F4A7C15
_LEAST_QUEUED = 1 << 10


class Sent(NamedTuple):
    """A prompt, and what is computed of it once for all caches.

    Attributes:
        tokens: int32 `[tokens]`.
        hashes: of every window of a block's size.
        names: of the full blocks: of their tokens and of all in front of them, and of the salt.
        contexts: uint64 `[full blocks + 1]`, see `cache/contexts.py`.
        answer_tokens: that are generated behind it, and equal to nothing.
        namespace: in which segments are found; None: none are.
    """

    tokens: IntArray
    hashes: HashArray
    names: list[int]
    contexts: npt.NDArray[np.uint64]
    answer_tokens: int
    namespace: int | None

    @classmethod
    def of(
        cls,
        tokens: IntArray,
        block_size: int,
        answer_tokens: int,
        namespace: int | None = 0,
        salt: str = "",
    ) -> Sent:
        """See the attributes."""
        hashes = window_hashes(tokens, block_size)
        of_blocks = hashes[::block_size]
        weights = _weights(len(of_blocks))
        names = np.cumsum(of_blocks * weights, dtype=np.uint64) + _number_of(salt)
        contexts = np.ones(len(of_blocks) + 1, np.uint64)  # the first block's: nothing is in front
        contexts[1:] = np.maximum(names, 2)
        return cls(tokens, hashes, names.tolist(), contexts, answer_tokens, namespace)


def _number_of(salt: str) -> np.uint64:
    """0 for none."""
    digest = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little") if salt else 0)


_weights_so_far = np.ones(1, np.uint64)


def _weights(count: int) -> npt.NDArray[np.uint64]:
    """Powers of an odd number: a sum with them depends on the order of its terms."""
    global _weights_so_far
    if count > len(_weights_so_far):
        powers = np.full(2 * count, _ODD, np.uint64)
        powers[0] = 1
        _weights_so_far = np.cumprod(powers, dtype=np.uint64)
    return _weights_so_far[:count]


class BlockPool:
    """Blocks, those that are free in the order in which they are taken.

    Args:
        num_blocks: of the pool.

    Attributes:
        num_free: blocks that are not in use.
        has_evicted: whether one with a name has been taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._untouched = 0  # from here on
        self._nameless: list[int] = []
        self._freed: deque[tuple[IntArray, int]] = deque()
        self._queued = 0  # entries of these, of which some are in use again
        self._freed_at = np.full(num_blocks, -1, np.int64)
        self._clock = 0
        self.has_evicted = False
        self._blocks: dict[int, int] = {}
        self._names = np.zeros(num_blocks, np.uint64)  # 0: none

    def find(self, names: Sequence[int]) -> list[int]:
        """Blocks with the first of these names, up to the first that has none."""
        found: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: list[int]) -> None:
        """These are in use; each is free."""
        self._freed_at[blocks] = -1
        self.num_free -= len(blocks)

    def take(self, count: int) -> IntArray:
        """So many free blocks, int32 `[count]`: those that were used last longest ago."""
        self.num_free -= count
        taken: list[IntArray] = []
        if self._nameless and count:
            taken.append(np.array(self._nameless[-count:], np.int32))
            del self._nameless[-count:]
            count -= len(taken[0])
        fresh = min(count, self.num_blocks - self._untouched)
        if fresh:
            taken.append(np.arange(self._untouched, self._untouched + fresh, dtype=np.int32))
            self._untouched += fresh
            count -= fresh
        self.has_evicted |= count > 0
        while count:
            queued, at = self._freed.popleft()
            blocks = queued[self._freed_at[queued] == at]
            self._queued -= len(queued)
            if len(blocks) > count:
                self._freed.appendleft((blocks[count:], at))
                self._queued += len(blocks) - count
                blocks = blocks[:count]
            taken.append(blocks)
            count -= len(blocks)
        found = np.concatenate(taken) if taken else np.empty(0, np.int32)
        self._freed_at[found] = -1
        self._forget(found)
        return found

    def _forget(self, taken: IntArray) -> None:
        named = taken[self._names[taken] != 0]
        names, blocks = self._names[named].tolist(), named.tolist()
        self._names[named] = 0
        # A block at a time takes several times as long, and there are millions of them.
        known = list(map(self._blocks.pop, names, repeat(None)))
        if known != blocks:
            gone = set(blocks)
            self._blocks.update(
                (name, block)
                for name, block in zip(names, known, strict=True)
                if block is not None and block not in gone
            )

    def name(self, blocks: list[int], names: list[int]) -> None:
        """Blocks have names from now on; where another has the same one, it keeps it."""
        self._names[blocks] = names
        deque(map(self._blocks.setdefault, names, blocks), maxlen=0)

    def free(self, blocks: Sequence[int] | IntArray) -> None:
        """Blocks are in use no more: the first of them is taken first."""
        freed = np.asarray(blocks, np.int32)
        if len(freed):
            self._clock += 1
            self._freed_at[freed] = self._clock
            self._freed.append((freed, self._clock))
            self._queued += len(freed)
            self.num_free += len(freed)
            if self._queued > 2 * self.num_blocks + _LEAST_QUEUED:
                self._compact()

    def _compact(self) -> None:
        """Drop entries of blocks that have been in use since."""
        kept = [(blocks[self._freed_at[blocks] == at], at) for blocks, at in self._freed]
        self._freed = deque((blocks, at) for blocks, at in kept if len(blocks))
        self._queued = sum(len(blocks) for blocks, _ in self._freed)

    def free_nameless(self, blocks: Sequence[int] | IntArray) -> None:
        """The same of blocks that nobody can find, which are taken before all others."""
        self._nameless += np.asarray(blocks, np.int32).tolist()
        self.num_free += len(blocks)


class FoundTokens(NamedTuple):
    """What is known of a prompt.

    Attributes:
        prefix_tokens: by prefix caching.
        segment_tokens: behind that, of segments at any offset.
        left: what is computed, by policy.
        fits: whether the cache has room for the request at all.
    """

    prefix_tokens: int
    segment_tokens: int
    left: dict[str, Left]
    fits: bool = True


class BlockCache:
    """One engine's.

    Args:
        num_blocks, block_size: of the KV cache.
        work: policies; None: prefix caching alone.
        max_depth: deepest provenance of a donor.
    """

    def __init__(
        self, num_blocks: int, block_size: int, work: PolicyWork | None, max_depth: int
    ) -> None:
        self._size = block_size
        self._pool = BlockPool(num_blocks)
        self._work = work
        self._max_depth = max_depth
        self._index = None if work is None else SegmentIndex(num_blocks, block_size)

    @property
    def has_evicted(self) -> bool:
        """Whether any block has been evicted."""
        return self._pool.has_evicted

    def run(self, sent: Sent) -> FoundTokens:
        """Look a prompt up, compute it, and hold it until its blocks are evicted."""
        size, pool, count = self._size, self._pool, len(sent.tokens)
        needed = -(-(count + sent.answer_tokens) // size)
        hit = pool.find(sent.names[: (count - 1) // size])  # the last token is always computed
        if needed > pool.num_blocks:
            nothing = {} if self._work is None else self._work.nothing(count)
            return FoundTokens(0, 0, nothing, fits=False)
        pool.hold(hit)
        start = len(hit) * size
        planned, segment_tokens, depth, left = self._plan(sent, start)
        donors = [] if planned is None else self._donors(planned, hit)
        if planned is not None and needed - len(hit) + len(donors) > pool.num_free:
            planned, donors, segment_tokens = None, [], 0
            left = {} if self._work is None else self._work.nothing(count - start)
        pool.hold(donors)
        taken = pool.take(needed - len(hit))
        if self._index is not None and len(taken):
            self._index.remove(taken.tolist())
        pool.free(donors)
        self._keep(sent, hit, taken, planned, depth)
        return FoundTokens(start, segment_tokens, left)

    def _plan(self, sent: Sent, start: int) -> tuple[Planned | None, int, int, dict[str, Left]]:
        """The first policy's plan, tokens that were found, their depth, and the work left."""
        work, index, count = self._work, self._index, len(sent.tokens)
        if work is None or index is None:
            return None, 0, 0, {}
        stop = count - 1
        if sent.namespace is None or stop - start < max(work.min_reused_tokens, self._size):
            return None, 0, 0, work.nothing(count - start)
        matches = find_matches(
            index, sent.namespace, sent.tokens, sent.hashes, start, stop, self._max_depth
        )
        if matches.num_tokens < work.min_reused_tokens:
            return None, 0, 0, work.nothing(count - start)
        prompt = Prompt(sent.namespace, sent.tokens, contexts=lambda at: sent.contexts[at])
        matches = compared(matches, index, prompt)
        planned, left = work.plans(matches.pieces, start, stop, count)
        return planned, matches.num_tokens, matches.max_depth, left

    @staticmethod
    def _donors(planned: Planned, hit: list[int]) -> list[int]:
        """Blocks that are copied from, but for those of the prefix hit, which are held already."""
        held = set(hit)
        return [block for block in planned.pieces.donor_blocks if block not in held]

    def _keep(
        self, sent: Sent, hit: list[int], taken: IntArray, planned: Planned | None, depth: int
    ) -> None:
        """A request has ended: what it leaves in the cache."""
        size, pool = self._size, self._pool
        whole = len(sent.names)
        until = len(hit) if planned is not None else whole  # exact up to here
        new = taken.tolist()
        blocks = [*hit, *new]
        pool.name(blocks[len(hit) : until], sent.names[len(hit) : until])
        if self._index is not None and sent.namespace is not None and whole:
            depths = np.zeros(whole, np.int32)
            if planned is not None:
                depths[len(hit) :] = self._depths(planned, len(hit) * size, whole, depth)
            self._insert(sent, np.asarray(blocks[:whole], np.int32), depths)
        full = (len(sent.tokens) + sent.answer_tokens) // size
        pool.free_nameless(blocks[full:])
        pool.free(blocks[:full][::-1])

    def _depths(self, planned: Planned, start: int, whole: int, depth: int) -> IntArray:
        """int32 `[blocks behind the prefix hit]`: as `scheduling/donors.py` has it."""
        computed = np.ones(whole * self._size - start, np.bool_)
        settled = planned.recipe.settled[: len(computed)]
        computed[: len(settled)] = settled
        donates = computed.reshape(-1, self._size).all(axis=1) & (depth < self._max_depth)
        return np.where(donates, depth + 1, -1).astype(np.int32)

    def _insert(self, sent: Sent, blocks: IntArray, depths: IntArray) -> None:
        index, size = self._index, self._size
        assert index is not None
        assert sent.namespace is not None
        missing = np.zeros(len(blocks), np.bool_)
        missing[index.missing(sent.namespace, blocks)] = True
        donors = np.flatnonzero((depths >= 0) & missing)
        for run in np.split(donors, np.flatnonzero(np.diff(donors) > 1) + 1):
            if not len(run):
                continue
            first, last = int(run[0]), int(run[-1]) + 1
            index.insert(
                sent.namespace,
                blocks[first:last],
                sent.tokens[first * size : last * size],
                first * size,
                parent_block=int(blocks[first - 1]) if first else -1,
                depths=depths[first:last],
                facts=BlockFacts(fresh=False, contexts=sent.contexts[first:last]),
            )
