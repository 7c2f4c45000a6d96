# SPDX-License-Identifier: Apache-2.0
"""From a request that ended to a frozen part of an entry, and from a lack of blocks to eviction.

With a second tier, each part is written through to it. What the frozen pool evicts, or has no room
for, is then read from there, and need not be computed again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.compat.block_events import BlockListener
from vllm_segreuse.features.knowledge.frozen import EntryUse, FrozenPart, FrozenPool
from vllm_segreuse.features.knowledge.kept import KeepingTier, Place
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.scheduling.health import Health

logger = logging.getLogger("vllm.segreuse")

MakePart = Callable[[FreezeOrder, list[int]], FrozenPart]
"""What a request has made of its blocks; raises `ValueError`, with the reason, if it has not."""

_REFUSALS = 1024
"""Entries of which it is remembered why they were not frozen."""


class Freezing(BlockListener):
    """What requests, vLLM's block pool and knowledge bases do with frozen blocks; one per engine.

    Args:
        entries: what is frozen.
        index: of the segments; a block that it does not contain is not frozen.
        is_exact: whether a block has an exact name; one that has none is not frozen.
        health: where errors over the entries end.
        tier: keeps entries beyond GPU memory; None where there is none.
    """

    def __init__(
        self,
        entries: FrozenPool,
        index: SegmentIndex,
        is_exact: Callable[[int], bool],
        health: Health,
        tier: KeepingTier | None = None,
    ) -> None:
        self.entries = entries
        self._index = index
        self._is_exact = is_exact
        self._health = health
        self._tier = tier
        self._refused: OrderedDict[str, str] = OrderedDict()

    # Requests.

    def notice(self, prompt: Prompt) -> None:
        """A prompt arrived: evicted entries whose text it contains may return."""
        self.entries.notice(prompt.namespace, lambda: prompt.hashes(self._index.block_size))

    def asked_for(self, prompt: Prompt, names: Iterable[str]) -> None:
        """A prompt arrived whose request names entries: those that were evicted may return."""
        self.entries.named(prompt.namespace, names)

    def finish(
        self,
        prompt: Prompt,
        order: FreezeOrder,
        block_ids: list[int],
        make_part: MakePart | None = None,
    ) -> bool:
        """Carry out the order of a request that has computed all of its prompt.

        Args:
            prompt: of the request.
            block_ids: its blocks, which it still holds.
            make_part: of a request that compresses a document; None: of any other.

        Returns:
            Whether it was carried out: the part is frozen, or the second tier keeps it. If not,
            `why_refused` has the reason.
        """
        self._refused.pop(order.entry, None)
        try:
            return self._carry_out(prompt, order, block_ids, make_part)
        except ValueError as reason:
            self.refuse(order.entry, str(reason))
            return False

    def _carry_out(
        self,
        prompt: Prompt,
        order: FreezeOrder,
        block_ids: list[int],
        make_part: MakePart | None,
    ) -> bool:
        tier = self._tier
        if make_part is None:
            part = self.part(prompt, order, block_ids)
        else:
            part = make_part(order, block_ids)
        why_not = self._why_not(order, part)
        if tier is None or make_part is not None:  # a tier finds records by their text
            held = () if tier is None else tier.held()
            is_frozen = self.entries.add(order, part, instead_of=held)
        else:
            is_kept = tier.keep(order.entry, order.part, order.parts, part.block_ids) is not False
            is_frozen = self.entries.add(order, part) or is_kept
            why_not += (
                "; and the second tier takes nothing now: an error, which the log has, has "
                "ended it, or a reset of the prefix cache is under way"
            )
        if not is_frozen:
            self.refuse(order.entry, why_not)
        return is_frozen

    def _why_not(self, order: FreezeOrder, part: FrozenPart) -> str:
        """Why the pool does not take a part, if it will not."""
        if order.part and order.entry not in self.entries:
            return (
                "parts of it were evicted, or it was removed, while the others were computed: "
                "warm it again when fewer requests run"
            )
        return (
            f"the frozen pool had no room for it: {self.entries.num_frozen} of "
            f"{self.entries.limit} blocks at most are frozen, and a part of it takes "
            f"{len({*part.block_ids})}: remove documents or raise frozen_share, and warm it again"
        )

    def refuse(self, entry: str, reason: str) -> None:
        """Note why an order was not carried out."""
        logger.debug("segment reuse: %s is not frozen: %s", entry, reason)
        self._refused[entry] = reason
        self._refused.move_to_end(entry)
        if len(self._refused) > _REFUSALS:
            self._refused.popitem(last=False)

    def why_refused(self, entry: str) -> str | None:
        """Why the last order for an entry was not carried out; None: it was, or long ago."""
        return self._refused.get(entry)

    def part(self, prompt: Prompt, order: FreezeOrder, block_ids: list[int]) -> FrozenPart:
        """What a request has computed, from the block of the order's first token to the last full
        block.

        Raises:
            ValueError: it holds no such block, or one that is not exact or not indexed.
        """
        size, first_token = self._index.block_size, order.first_token
        first, last = first_token // size, len(prompt.tokens) // size
        blocks = block_ids[first:last]
        if not blocks:
            raise ValueError(f"no full block holds a token from {first_token} on")
        for block in blocks:
            if not self._is_exact(block):
                raise ValueError(f"block {block} is not exact")
        unknown = self._index.missing(prompt.namespace, np.asarray(blocks, np.int32)).size
        if unknown:
            raise ValueError(
                f"{unknown} of its {len(blocks)} blocks may not donate: an error has ended that, "
                "which the server's log has: reset the prefix cache, and warm it again"
            )
        middle = (-(-first_token // size) + last - 1) // 2
        window = prompt.tokens[middle * size : (middle + 1) * size]
        probe = None
        if middle * size >= first_token:
            probe = int(window_hashes(np.ascontiguousarray(window), size)[0])
        return FrozenPart(prompt.namespace, blocks, probe)

    # The block pool.

    def make_room(self, missing: int) -> bool:
        """Evict entries until so many more blocks are free.

        Returns:
            Whether blocks became free. If all that are frozen would not do, none is evicted: the
            request has to wait for others in any case.
        """
        if not 0 < missing <= self.entries.num_frozen:
            return False
        with self._health.contained("the eviction of frozen blocks"):
            return missing <= self.entries.num_reclaimable() and self.entries.make_free(missing) > 0
        return False

    def begin_step(self) -> None:
        """A scheduling step is over: evict entries while too many blocks are in use."""
        with self._health.contained("the eviction of frozen blocks"):
            self.entries.relieve()

    def evicted(self, block_ids: Sequence[int]) -> None:
        """vLLM removed blocks' names, frozen or not."""
        with self._health.contained("the removal of frozen blocks"):
            self.entries.lost(block_ids)

    def resetting(self) -> None:
        """Release everything; unless a request holds blocks, too: then vLLM refuses to reset in
        any case, and nothing is lost."""
        with self._health.contained("a reset of the frozen pool"):
            if self.entries.is_sole_holder():
                self.entries.reset()

    # Knowledge bases.

    def state(self) -> dict[str, Any]:
        """What knowledge bases need to know; uses are reported once only.

        `limit` is what all entries together may take, in GPU memory or in the second tier, and
        `frozen_limit` what those may that are in GPU memory only;
        `stored` are those that this tier holds, with their place. They need not return; those that
        it had no room for do.
        """
        entries = self.entries
        limit, stored, uses = entries.limit, dict[str, Place](), entries.take_uses()
        warm, wanted = entries.warm(), entries.wanted()
        if self._tier is not None:
            limit, stored = max(limit, self._tier.capacity_blocks), self._tier.held()
            wanted = [name for name in wanted if name not in stored]
            wanted += [name for name in self._tier.lost() if name not in {*warm, *wanted}]
            for name, use in self._tier.take_uses().items():
                before = uses.get(name, EntryUse(0, 0.0))
                uses[name] = EntryUse(before.hits + use.hits, max(before.last, use.last))
        return {
            "total": entries.num_blocks,
            "free": entries.num_free,
            "frozen": entries.num_frozen,
            "limit": limit,
            "frozen_limit": entries.limit,
            "block_size": self._index.block_size,
            "given_back": entries.num_evicted,
            "warm": {name: list(entry) for name, entry in warm.items()},
            "uses": {name: list(use) for name, use in uses.items()},
            "wanted": wanted,
            "stored": stored,
        }

    def forget(self, entries: Iterable[str]) -> None:
        """Release entries that were deleted; unknown ones are no error."""
        names = list(entries)
        self.entries.release(names)
        if self._tier is not None:
            self._tier.release(names)
