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
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from segreuse_extras.compressed.finder import CopyFinder, NamedFinder, PartsFinder
from segreuse_extras.compressed.orders import AnchorOrder, CopyOrder, ScoreOrder
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.features.knowledge.freezing import MakePart
from vllm_segreuse.features.knowledge.frozen import FrozenPart, FrozenPool
from vllm_segreuse.options.parsing import ParsedRequest
from vllm_segreuse.plan import (
    BoolArray,
    FreezeOrder,
    Gather,
    IntArray,
    PlanOutcome,
    Probed,
    Recipe,
    ReusePlan,
    Segments,
    fates_of,
)
from vllm_segreuse.scheduling.tracked import MakeRecipe, Method, TrackedRequest, Use

if TYPE_CHECKING:
    from vllm.v1.request import Request

POLICY = "compress"
"""What reports call the requests that compress a document."""


class Kept(NamedTuple):
    """Of a request that makes a part of a compressed document.

    Attributes:
        num_tokens: of the part, from the first token of its order to freeze on.
        num_copied: tokens of its prompt that were to be copied, and not computed.
        num_computed: how many of these the workers have computed, by the last plan of the request.
    """

    num_tokens: int
    num_copied: int
    num_computed: int = 0


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
        self._kept: dict[str, Kept] = {}

    # Requests that name documents.

    @property
    def remembered(self) -> set[str]:
        """Requests of whose orders to score, or choices, something is kept until they end."""
        return {*self._scores, *self._chosen}

    def name(self, tracked: TrackedRequest, names: Sequence[str]) -> None:
        """A request has arrived that names compressed documents.

        One that asks for exact KV computes their tokens.
        """
        method = tracked.method
        if method.finder.is_exact:
            return
        namespace = tracked.prompt.namespace
        finder = NamedFinder(
            method.finder,
            names,
            lambda name: self._entries.compressed(name, namespace),
            self._block_size,
            method.min_reused_tokens,
        )
        tracked.method = replace(method, finder=finder, min_reused_tokens=1)
        tracked.stands_for_others(finder.first_place(tracked.prompt), self._block_size)

    # Requests that make them.

    def order(self, tracked: TrackedRequest, request: Request, parsed: ParsedRequest) -> None:
        """A request of the server's own has arrived with an order.

        Raises:
            ValueError: it is none.
        """
        finder: Finder
        make_recipe: MakeRecipe = _copying
        if parsed.score is not None:
            chosen = ScoreOrder.parse(parsed.score)
            self._scores[tracked.request_id] = chosen
            source = tracked.prompt.tokens[: chosen.stop]
            finder = self._copies(request, source, np.arange(chosen.stop))
            make_recipe = _probing(chosen)
            tracked.tags = tracked.tags._replace(explains=True)
        elif parsed.copy is not None:
            copied = CopyOrder.parse(parsed.copy)
            source, positions = np.asarray(copied.source), np.asarray(copied.kept)
            finder = self._copies(request, source, positions)
            self._kept[tracked.request_id] = Kept(len(positions), len(positions))
        else:
            order, namespace = AnchorOrder.parse(parsed.anchors), tracked.prompt.namespace
            parts = partial(self._entries.compressed, order.entry, namespace, so_far=True)
            finder = PartsFinder(parts, order.copied, self._block_size)
            self._kept[tracked.request_id] = Kept(order.kept, order.copied)
        tracked.method = Method(POLICY, finder, make_recipe, max_drift=tracked.method.max_drift)
        tracked.mode = Use.REQUIRE
        tracked.donates_nothing()
        tracked.exact_stop = 0  # its own prefix, cached or stored, is not what the order says

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

    def carried_out(
        self, request_id: str, outcome: PlanOutcome, plan: ReusePlan | None = None
    ) -> bool:
        """The workers have carried a plan out; of a score, note which tokens they have chosen, and
        of what keeps tokens, whether these were copied.

        Args:
            plan: of the request; None: it has none.

        Returns:
            Whether it was a score.
        """
        kept = self._kept.get(request_id)
        if kept is not None and plan is not None:
            computed = plan.recomputed_after(outcome)
            self._kept[request_id] = kept._replace(num_computed=computed)
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
        self._kept.pop(request_id, None)
        order = self._scores.pop(request_id, None)
        chosen = self._chosen.pop(request_id, None)
        return chosen if order is not None and chosen and len(chosen) == order.keep else None

    def part(self, tracked: TrackedRequest) -> MakePart | None:
        """What makes a part of a compressed document of a request's blocks; None: it makes none."""
        kept = self._kept.get(tracked.request_id)
        return None if kept is None else partial(self.kept_part, tracked, kept)

    def kept_part(
        self, tracked: TrackedRequest, kept: Kept, order: FreezeOrder, block_ids: list[int]
    ) -> FrozenPart:
        """The kept tokens of a request that has copied what it was to copy.

        Raises:
            ValueError: it was not copied, all of it; the workers report that they had to compute
                some; one of the blocks is exact; or it was preempted while the step that ends it
                was under way, and holds none.
        """
        plan = tracked.plan
        if kept.num_copied and (plan is None or plan.start or plan.num_reused != kept.num_copied):
            reason = tracked.decision.reason
            raise ValueError(f"{kept.num_copied} tokens were not copied ({reason})")
        if kept.num_computed:
            raise ValueError("copying failed, and its kept tokens were computed as a text")
        size, first = self._block_size, order.first_token
        stop = first + kept.num_tokens
        blocks = block_ids[first // size : -(-stop // size)]
        if len(blocks) != -(-stop // size) - first // size:
            raise ValueError(f"it was preempted: {len(blocks)} blocks hold its kept tokens")
        exact = [block for block in blocks if self._pool.is_exact(block)]
        if kept.num_copied and exact:
            raise ValueError(f"block {exact[0]} is exact")
        tokens = tracked.prompt.tokens[first:stop].copy()
        return FrozenPart(tracked.prompt.namespace, blocks, None, tokens, first)


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
