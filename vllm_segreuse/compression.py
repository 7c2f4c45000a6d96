# SPDX-License-Identifier: Apache-2.0
"""Compressed documents in the scheduler's process: requests that make them, and that name them.

    compute   context and chunk as an ordinary prompt: exact blocks
    score     the same blocks, and the chunk once more, which probes them      (`ScoreOrder`)
    copy      the kept tokens of these blocks, as the first tokens of a prompt (`CopyOrder`)
    anchors   a chunk behind the anchors of those before it, its own are kept (`AnchorOrder`)

All orders are plans as others are: the workers move KV, and choose tokens by the attention that
probes pay, as they do for any policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vllm_segreuse.cache.compressed import CopyFinder, NamedFinder, PartsFinder
from vllm_segreuse.cache.frozen import FrozenPool
from vllm_segreuse.cache.tracked import Kept, TrackedRequest
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.config import ParsedRequest
from vllm_segreuse.plan import (
    AnchorOrder,
    BoolArray,
    CopyOrder,
    Gather,
    IntArray,
    PlanOutcome,
    Probed,
    Recipe,
    ScoreOrder,
    Segments,
    fates_of,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

POLICY = "compress"
"""What reports call the requests that compress a document."""


class Compression:
    """Of one engine.

    Args:
        pool: vLLM's blocks.
        entries: what is frozen.
        block_size: tokens per block.
    """

    def __init__(self, pool: SegmentBlockPool, entries: FrozenPool, block_size: int) -> None:
        self._pool = pool
        self._entries = entries
        self._block_size = block_size
        self._scores: dict[str, ScoreOrder] = {}
        self._chosen: dict[str, list[int]] = {}

    # Requests that name documents.

    def name(self, tracked: TrackedRequest, names: Sequence[str]) -> None:
        """A request has arrived that names compressed documents.

        One that asks for exact KV computes their tokens.
        """
        if tracked.finder.is_exact:
            return
        namespace = tracked.prompt.namespace
        finder = NamedFinder(
            *(tracked.finder, names, lambda name: self._entries.compressed(name, namespace)),
            self._block_size,
        )
        tracked.finder = finder
        tracked.stands_for_others(finder.first_place(tracked.prompt), self._block_size)

    # Requests that make them.

    def order(self, tracked: TrackedRequest, request: Request, parsed: ParsedRequest) -> None:
        """A request of the server's own has arrived with an order.

        Raises:
            ValueError: it is none.
        """
        tracked.make_recipe = _copying
        if parsed.score is not None:
            chosen = ScoreOrder.parse(parsed.score)
            self._scores[tracked.request_id] = chosen
            source = tracked.prompt.tokens[: chosen.stop]
            tracked.finder = self._copies(request, source, np.arange(chosen.stop))
            tracked.make_recipe = _probing(chosen)
            tracked.explains = True
        elif parsed.copy is not None:
            copied = CopyOrder.parse(parsed.copy)
            source, positions = np.asarray(copied.source), np.asarray(copied.kept)
            tracked.finder = self._copies(request, source, positions)
            tracked.kept = Kept(len(positions), len(positions))
        else:
            order, namespace = AnchorOrder.parse(parsed.anchors), tracked.prompt.namespace
            parts = partial(self._entries.compressed, order.entry, namespace, so_far=True)
            tracked.finder = PartsFinder(parts, order.copied, self._block_size)
            tracked.kept = Kept(order.kept, order.copied)
        tracked.policy = POLICY
        tracked.bypass, tracked.donates, tracked.required = None, False, True
        tracked.exact_stop = 0  # its own prefix, cached or stored, is not what the order says
        tracked.min_reused_tokens = 1

    def _copies(self, asker: Request, source: IntArray, positions: IntArray) -> CopyFinder:
        return CopyFinder(self._resident(asker, source), positions, self._block_size)

    def _resident(self, asker: Request, source: IntArray) -> Callable[[], IntArray]:
        """Blocks of a prompt that was computed by the server itself, with its filler."""
        from vllm.v1.request import Request

        filler = np.repeat(source[-1:], -len(source) % self._block_size)
        alone = Request(
            request_id="",
            prompt_token_ids=np.concatenate((source, filler)).tolist(),
            sampling_params=asker.sampling_params,
            pooling_params=None,
            lora_request=asker.lora_request,
            cache_salt=asker.cache_salt,
            block_hasher=asker._block_hasher,
        )
        count = len(alone.block_hashes)
        return lambda: self._pool.resident_blocks(alone, 0, count)

    def carried_out(self, request_id: str, outcome: PlanOutcome) -> bool:
        """The workers have carried a plan out; of a score, note which tokens they have chosen.

        Returns:
            Whether it was one.
        """
        order = self._scores.get(request_id)
        if order is not None and not outcome.in_full:
            found = (i for i in outcome.positions or () if order.first <= i < order.stop)
            self._chosen[request_id] = list(found)
        return order is not None

    def ended(self, request_id: str) -> list[int] | None:
        """A request has ended.

        Returns:
            The positions that were chosen, of a score; None of any other request, and of a score
            that did not choose as many as it was to.
        """
        order = self._scores.pop(request_id, None)
        chosen = self._chosen.pop(request_id, None)
        return chosen if order is not None and chosen and len(chosen) == order.keep else None


def _copying(reused: BoolArray, segments: Segments) -> Recipe:
    """Nothing of what is copied is computed."""
    return Recipe.without_choice(~reused)


def _probing(order: ScoreOrder) -> Callable[[BoolArray, Segments], Recipe]:
    """The chunk once more probes the chunk: what a document's own text looks up when it is read
    again (KVzip, arXiv 2505.23416, which takes the largest share of attention, too)."""

    def recipe(reused: BoolArray, segments: Segments) -> Recipe:
        if not reused[: order.stop].all():
            return Recipe.without_choice(~reused)
        position = np.arange(len(reused))
        probes = position >= order.stop
        context = position < order.first
        return Recipe.of(Probed(Gather.MAX), fates_of(context | probes, probes), order.keep)

    return recipe
