# SPDX-License-Identifier: Apache-2.0
"""What a log would gain, without an engine: caches of several sizes side by side, one prompt after
the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from segreuse_tools.estimate.block_cache import BlockCache, FoundTokens, Sent
from segreuse_tools.estimate.component_cache import ComponentCache
from segreuse_tools.estimate.cost_model import CostModel, Spread
from segreuse_tools.estimate.edited_turns import EditedTurns, SessionPrompts
from segreuse_tools.estimate.prompts import PromptTokens, Router
from segreuse_tools.estimate.request_log import Reason
from segreuse_tools.estimate.traces.request import PromptPart
from segreuse_tools.estimate.work_left import Left, PolicyWork
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import BoolArray, Segments

UNLIMITED_TOKENS = 1 << 24
"""Tokens of a cache without a limit: what any simulation may take of memory is limited."""

PREFIX = "prefix caching"


@dataclass(frozen=True)
class GainSetting:
    """What is simulated.

    Attributes:
        cache_tokens: tokens of KV that each engine's cache holds, by size; None: no limit.
        block_size: tokens per block.
        policies: those that are compared; the first one's plans decide what is cached.
        layers: of the model.
        engines: how many, each with a cache.
        router: see `Router`.
        tier_tokens: of host memory and disks behind each cache.
        max_depth: deepest provenance of a donor.
        options: of requests.
        cost: of the device; None: no times.
    """

    cache_tokens: tuple[int | None, ...]
    block_size: int
    policies: tuple[str, ...]
    layers: int
    engines: int
    router: str
    tier_tokens: int
    max_depth: int
    options: PolicyOptions
    cost: CostModel | None = None


@dataclass(frozen=True)
class PolicyRow:
    """Work that is left under a policy; shares are of all prompt tokens.

    Attributes:
        policy: its name, or `PREFIX`.
        computed_share: (token, layer) pairs that are computed, of all.
        reused_share: of segments.
        recomputed_share: of these, computed again at most.
        first_token_s: by the cost model: half of the prompts, and 90 % of them, take no longer;
            None: no device was given.
    """

    policy: str
    computed_share: float
    reused_share: float
    recomputed_share: float
    first_token_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class SizeRow:
    """What caches of one size know; shares are of all prompt tokens.

    Attributes:
        cache_tokens: of each engine; None: no limit.
        is_capped: there was a limit all the same, and it was reached.
        prefix_share: by prefix caching, in whole blocks.
        any_position_share: by this plugin: its prefix hits, and segments at any offset in blocks,
            of which each prompt has its own copy.
        any_position_prefix_share: of these, the prefix hits.
        tier_prefix_share, tier_any_position_share: of these, how much more with the tier.
        whole_prefix_share, whole_reordered_share, whole_any_position_share: of components that are
            known as a whole, each held once; None: the log has none.
        whole_computed_share: work left of these by the first policy, 16 tokens lost of each.
        too_long: requests that such a cache has no room for.
        policies: work left.
    """

    cache_tokens: int | None
    is_capped: bool
    prefix_share: float
    any_position_share: float
    any_position_prefix_share: float
    tier_prefix_share: float | None
    tier_any_position_share: float | None
    whole_prefix_share: float | None
    whole_reordered_share: float | None
    whole_any_position_share: float | None
    whole_computed_share: float | None
    too_long: int
    policies: tuple[PolicyRow, ...]


@dataclass(frozen=True)
class Gain:
    """What `vllm-segreuse estimate` prints without an engine; its fields are the keys of `--json`.

    Attributes:
        format: of the log.
        requests, prompt_tokens: of it.
        median_tokens: of the prompts, to within a hundredth.
        left_out: lines that were not replayed, by the reason.
        out_of_order: lines whose times run backwards, which were.
        turns: how prompts go on with the one before of their session.
        block_size, engines, router, tier_tokens: see `GainSetting`.
        sizes: by size of the cache.
    """

    format: str
    requests: int
    prompt_tokens: int
    median_tokens: int
    left_out: tuple[Reason, ...]
    out_of_order: tuple[Reason, ...]
    turns: EditedTurns
    block_size: int
    engines: int
    router: str
    tier_tokens: int
    sizes: tuple[SizeRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Its fields, as JSON has them."""
        return asdict(self)


LOST_TOKENS = 16
"""Of a component that is known as a whole, what blocks may cost on both sides."""


@dataclass
class _Sums:
    """Tokens so far."""

    prefix: int = 0
    found: int = 0
    found_prefix: int = 0
    whole_prefix: int = 0
    whole_reordered: int = 0
    whole_anywhere: int = 0
    whole_computed: float = 0.0
    too_long: int = 0
    computed: dict[str, float] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    recomputed: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, Spread] = field(default_factory=dict)


class _Size:
    """Caches of one size, one for each engine and way.

    Args:
        tokens: that each holds.
        setting: see there.
        work: of all policies.
        bound: of the first policy.
    """

    def __init__(
        self, tokens: int | None, setting: GainSetting, work: PolicyWork, bound: PolicyWork
    ) -> None:
        self._setting = setting
        self._bound = bound
        self.capacity = UNLIMITED_TOKENS if tokens is None else tokens
        blocks = max(1, self.capacity // setting.block_size)
        size, depth, engines = setting.block_size, setting.max_depth, range(setting.engines)
        self._prefix = [BlockCache(blocks, size, None, depth) for _ in engines]
        self._segments = [BlockCache(blocks, size, work, depth) for _ in engines]
        self._components = [ComponentCache(self.capacity) for _ in engines]
        self.sums = _Sums()

    @property
    def is_full(self) -> bool:
        """Whether any cache has had to evict."""
        return any(cache.has_evicted for cache in (*self._prefix, *self._segments))

    def run(self, engine: int, prompt: PromptTokens, sent: Sent) -> None:
        """One more prompt."""
        sums, count = self.sums, len(sent.tokens)
        plain, found = self._prefix[engine].run(sent), self._segments[engine].run(sent)
        sums.prefix += plain.prefix_tokens
        sums.found += found.prefix_tokens + found.segment_tokens
        sums.found_prefix += found.prefix_tokens
        sums.too_long += not found.fits
        self._note(plain, found, count)
        if prompt.parts is not None:
            self._run_components(self._components[engine], prompt.parts, count)

    def _note(self, plain: FoundTokens, found: FoundTokens, count: int) -> None:
        left = {PREFIX: Left(count - plain.prefix_tokens, 0, 0), **found.left}
        starts = {PREFIX: plain.prefix_tokens}
        sums, cost = self.sums, self._setting.cost
        for name, each in left.items():
            sums.computed[name] = sums.computed.get(name, 0.0) + each.computed
            sums.reused[name] = sums.reused.get(name, 0) + each.reused
            sums.recomputed[name] = sums.recomputed.get(name, 0) + each.recomputed
            if cost is not None:
                start = starts.get(name, found.prefix_tokens)
                seconds = cost.seconds(each.computed, start, count)
                sums.seconds.setdefault(name, Spread()).add(seconds)

    def _run_components(
        self, cache: ComponentCache, parts: tuple[PromptPart, ...], count: int
    ) -> None:
        prefix, reordered, known = cache.run(parts)
        sums = self.sums
        sums.whole_prefix += prefix
        sums.whole_reordered += reordered
        sums.whole_anywhere += sum(part.tokens for part, it in zip(parts, known, strict=True) if it)
        reused, segments = known_segments(parts, known, min(prefix, count - 1))
        (left,) = self._bound.of_segments(reused, segments, count - min(prefix, count - 1)).values()
        sums.whole_computed += left.computed


def known_segments(
    parts: tuple[PromptPart, ...], known: Sequence[bool], start: int
) -> tuple[BoolArray, Segments]:
    """Tokens behind the prefix, but the last, of components that are known, `LOST_TOKENS` fewer of
    each; and where each of these begins."""
    stops = np.cumsum([part.tokens for part in parts])
    reused = np.zeros(int(stops[-1]) - 1 - start, np.bool_)
    begins: list[int] = []
    for part, stop, it in zip(parts, stops.tolist(), known, strict=True):
        first = stop - part.tokens - start
        last = min(first + part.tokens - LOST_TOKENS, len(reused))
        if it and first >= 0 and last > first:
            reused[first:last] = True
            begins.append(first)
    first = np.array(begins, np.int32)
    return reused, Segments.elsewhere(first, first + np.int32(start))


class Simulation:
    """All sizes.

    Args:
        setting: see there.
    """

    def __init__(self, setting: GainSetting) -> None:
        self._setting = setting
        self._router = Router(setting.engines, setting.router)
        work = PolicyWork(setting.policies, setting.block_size, setting.layers, setting.options)
        bound = PolicyWork(
            setting.policies[:1], setting.block_size, setting.layers, setting.options
        )

        def of(tokens: int | None) -> _Size:
            return _Size(tokens, setting, work, bound)

        self._sizes = [of(tokens) for tokens in setting.cache_tokens]
        # A cache in front of a tier evicts into it: both know together what one of their sizes
        # knows.
        self._tiered = [
            None if tokens is None or not setting.tier_tokens else of(tokens + setting.tier_tokens)
            for tokens in setting.cache_tokens
        ]
        self.requests = 0
        self.prompt_tokens = 0
        self.has_components = False
        self.lengths = Spread()
        self.sessions = SessionPrompts(setting.block_size)

    def run(self, prompt: PromptTokens) -> None:
        """One more prompt, in all of them."""
        setting, count = self._setting, len(prompt.tokens)
        self.requests += 1
        self.prompt_tokens += count
        self.lengths.add(count)
        self.has_components |= prompt.parts is not None
        sent = Sent.of(
            prompt.tokens, setting.block_size, prompt.answer_tokens, prompt.namespace, prompt.salt
        )
        self.sessions.run(prompt.session if prompt.is_alone else None, sent)
        engine = self._router.choose(prompt)
        for size in (*self._sizes, *filter(None, self._tiered)):
            size.run(engine, prompt, sent)

    def rows(self) -> Iterator[SizeRow]:
        """What they come to; at least one prompt was run."""
        both = zip(self._setting.cache_tokens, self._sizes, self._tiered, strict=True)
        for tokens, size, tiered in both:
            yield self._row(tokens, size, tiered)

    def _row(self, tokens: int | None, size: _Size, tiered: _Size | None) -> SizeRow:
        sums, total = size.sums, self.prompt_tokens

        def whole(known: float) -> float | None:
            return known / total if self.has_components else None

        def more(known: int, less: int) -> float | None:
            return None if tiered is None else max(0, known - less) / total

        return SizeRow(
            cache_tokens=tokens,
            is_capped=tokens is None and size.is_full,
            prefix_share=sums.prefix / total,
            any_position_share=sums.found / total,
            any_position_prefix_share=sums.found_prefix / total,
            tier_prefix_share=more(tiered.sums.prefix if tiered else 0, sums.prefix),
            tier_any_position_share=more(tiered.sums.found if tiered else 0, sums.found),
            whole_prefix_share=whole(sums.whole_prefix),
            whole_reordered_share=whole(sums.whole_reordered),
            whole_any_position_share=whole(sums.whole_anywhere),
            whole_computed_share=whole(sums.whole_computed),
            too_long=sums.too_long,
            policies=tuple(self._policy_row(name, sums) for name in sums.computed),
        )

    def _policy_row(self, name: str, sums: _Sums) -> PolicyRow:
        total, spread = self.prompt_tokens, sums.seconds.get(name)
        return PolicyRow(
            name,
            sums.computed[name] / total,
            sums.reused[name] / total,
            sums.recomputed[name] / total,
            None if spread is None else (spread.quantile(0.5), spread.quantile(0.9)),
        )
