# SPDX-License-Identifier: Apache-2.0
"""Conversations whose moved text is kept as an earlier turn has left it.

conversation   | system | documents | question | answer | question ...
turn 1           prefix   moved      computed  computed
turn 2           prefix   taken      taken     taken     computed
turn 2, else     prefix   moved      reused    reused    computed

Blocks that hold moved tokens donate to nobody: their text is found where it was computed, and moved
from there at each turn, and the policy chooses of it anew. With `recompute_once` the next turn
finds the blocks of the turn before instead, in its own namespace, by vLLM's chained hashes of their
whole prefix. It takes the blocks themselves, as a prefix hit is taken: nothing is copied, and what
the policy chose for an earlier question is not chosen again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.compat.block_events import BlockListener, NamedBlocks
from vllm_segreuse.scheduling.health import Health
from vllm_segreuse.scheduling.tracked import NOTHING_LEFT, LeftBehind, TrackedRequest

_Name = tuple[bytes, bytes]
"""Key of a namespace, and vLLM's chained hash of a block."""


class Conversations(BlockListener):
    """Blocks behind moved text, by the whole text up to their ends. One per engine.

    Of requests with `recompute_once` only: the others neither find them nor leave any.

    Args:
        requests: live requests with extra keys, by id.
        namespaces: of the ids of their prompts; an id is given to another one day.
        health: where errors over the index end.
        block_size: tokens per block.
    """

    def __init__(
        self,
        requests: Mapping[str, TrackedRequest],
        namespaces: NamespaceTable,
        health: Health,
        block_size: int,
    ) -> None:
        self._requests = requests
        self._namespaces = namespaces
        self._health = health
        self._block_size = block_size
        self._block: dict[_Name, int] = {}
        self._kept: dict[int, tuple[_Name, int]] = {}  # by block: its name, depth of its donors
        self._fresh: set[int] = set()
        self._continuing: set[str] = set()

    def take_part(self, request_id: str) -> None:
        """A request with `recompute_once` arrived."""
        self._continuing.add(request_id)

    def ended(self, request_id: str) -> None:
        """A request has ended."""
        self._continuing.discard(request_id)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, block_id: int) -> bool:
        """Whether a block is kept."""
        return block_id in self._kept

    def named(self, blocks: NamedBlocks) -> None:
        """Keep those that stand behind moved text."""
        tracked = self._requests.get(blocks.request_id)
        if tracked is None or not tracked.donates or self._health.broken:
            return
        with self._health.contained("a conversation"):
            self._keep(tracked, blocks)

    def _keep(self, tracked: TrackedRequest, blocks: NamedBlocks) -> None:
        if tracked.donor_depth < 0 or tracked.request_id not in self._continuing:
            return
        exact = tracked.exact_ends[1] // self._block_size
        last = blocks.first + len(blocks.block_ids)
        names = self._names(tracked.prompt, blocks.first, last)
        for index, block, name in zip(
            range(blocks.first, last), blocks.block_ids, names, strict=False
        ):
            if index >= exact:
                self._forget(block)
                self._kept[block] = name, tracked.donor_depth
                self._block[name] = block
                self._fresh.add(block)

    def evicted(self, block_ids: Sequence[int]) -> None:
        """Forget blocks."""
        if not self._health.broken and self._kept:
            with self._health.contained("the removal of blocks"):
                for block_id in block_ids:
                    self._forget(block_id)

    def reset(self) -> None:
        """Forget all of them."""
        self._block.clear()
        self._kept.clear()
        self._fresh.clear()

    def begin_step(self) -> None:
        """A scheduling step is over: what it named may be found from the next on."""
        self._fresh.clear()

    def _forget(self, block_id: int) -> None:
        name, _ = self._kept.pop(block_id, (None, 0))
        self._fresh.discard(block_id)
        if name is not None and self._block.get(name) == block_id:
            del self._block[name]

    def _names(self, prompt: Prompt, first: int, last: int) -> Iterator[_Name]:
        # vLLM's hashes are the same in all namespaces.
        return zip(repeat(self._namespaces.key(prompt.namespace)), prompt.names(first, last))

    def found(self, prompt: Prompt, start: int, stop: int) -> LeftBehind:
        """What an earlier turn has left behind the prefix hit, up to the first hole.

        Args:
            prompt: of a request with `recompute_once`.
            start: end of the prefix hit, in whole blocks.
            stop: of the search.
        """
        size, first = self._block_size, start // self._block_size
        blocks: list[int] = []
        for name in self._names(prompt, first, max(first, stop // size)):
            block = self._block.get(name)
            if block is None or block in self._fresh:
                break
            blocks.append(block)
        if not blocks:
            return NOTHING_LEFT
        depth = max(self._kept[block][1] for block in blocks)
        return LeftBehind(start, (first + len(blocks)) * size, blocks, depth)
