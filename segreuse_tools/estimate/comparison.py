# SPDX-License-Identifier: Apache-2.0
"""What a log comes to: with prefix caching alone, and with segments by policy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from segreuse_tools.estimate.replay import Pace, Replayed, replay
from segreuse_tools.estimate.request_log import LogError, Reason
from segreuse_tools.estimate.served_model import Model
from segreuse_tools.estimate.twins import Arm, Twin
from segreuse_tools.model_folder import InputError
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.parsing import EXTRA_KEYS

if TYPE_CHECKING:
    from segreuse_tools.estimate.modelless_engine import ModellessEngine
    from segreuse_tools.estimate.prompt_rendering import Asked

MOST_BLOCKS = 1 << 19
"""Of a KV cache whose size was not given."""


@dataclass(frozen=True)
class Cache:
    """The KV cache.

    Attributes:
        num_blocks: as vLLM counts them.
        block_size: tokens per block.
        gib: of one device; None: the model's layers could not be examined.
        is_given: whether its size was asked for; else it is as large as the log needs.
        is_capped: whether the log may need more, and `MOST_BLOCKS` was the limit.
    """

    num_blocks: int
    block_size: int
    gib: float | None
    is_given: bool
    is_capped: bool


@dataclass(frozen=True)
class Row:
    """One replay; tokens are those of prompts.

    Attributes:
        policy: None: prefix caching alone.
        prefix_tokens: found by prefix caching.
        reused_tokens: of segments.
        recomputed_tokens: of these, computed again.
        computed_tokens: (token, layer) pairs that are computed, divided by the number of layers.
        reusing_requests: that reused segments.
        bypassed: requests that did not, by the reason.
        is_planned: `recomputed_tokens` and `computed_tokens` are what the scheduler's side plans;
            workers may decide otherwise.
        evicted_blocks, preemptions, most_blocks: see `Replayed`.
    """

    policy: str | None
    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: float
    reusing_requests: int
    bypassed: dict[str, int]
    is_planned: bool
    evicted_blocks: int
    preemptions: int
    most_blocks: int


@dataclass(frozen=True)
class Estimate:
    """What `vllm-segreuse estimate` prints; its fields are the keys of `--json`.

    Attributes:
        requests, prompt_tokens, median_tokens: of the log.
        with_extra_keys: requests that name a namespace.
        namespaces: distinct extra keys.
        left_out: lines that were not replayed, by the reason.
        concurrency: requests at a time; None: they arrived at their logged times.
        cache: see `Cache`.
        has_tier: whether the server has a second tier. None is replayed, so what is evicted is
            computed again.
        rows: prefix caching alone, then the policies.
    """

    requests: int
    prompt_tokens: int
    median_tokens: int
    with_extra_keys: int
    namespaces: int
    left_out: tuple[Reason, ...]
    concurrency: int | None
    cache: Cache
    has_tier: bool
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """Its fields, as JSON has them."""
        return asdict(self)


def estimate(
    model: Model,
    asked: Sequence[Asked],
    config: SegReuseConfig,
    policies: Sequence[str],
    cache: Cache,
    pace: Pace,
    left_out: tuple[Reason, ...],
) -> Estimate:
    """Replay a log: once without segments, and once with each policy.

    Raises:
        LogError: a request does not fit into the KV cache.
    """
    _check_sizes(asked, cache)
    keys = {tuple(one.extra_args[EXTRA_KEYS]) for one in asked if EXTRA_KEYS in one.extra_args}
    arms = [Arm(config, policy) for policy in [None, *(policies if keys else ())]]
    lengths = [len(one.token_ids) for one in asked]
    return Estimate(
        requests=len(asked),
        prompt_tokens=sum(lengths),
        median_tokens=round(statistics.median(lengths)),
        with_extra_keys=sum(EXTRA_KEYS in one.extra_args for one in asked),
        namespaces=len(keys),
        left_out=left_out,
        concurrency=pace.concurrency if pace.tokens_per_s is None else None,
        cache=cache,
        has_tier=config.tier is not None,
        rows=tuple(_rows(model, asked, arms, cache, pace)),
    )


def cache_of(
    model: Model,
    asked: Sequence[Asked],
    block_size: int,
    num_blocks: int | None = None,
    gib: float | None = None,
) -> Cache:
    """The KV cache of a size that was given, or of one that the log fits into.

    Raises:
        InputError: the size was given in GiB, and what a block takes is not known.
    """
    block_bytes = None if model.kv_bytes is None else model.kv_bytes * block_size
    if gib is not None:
        if block_bytes is None:
            raise InputError("the model's layers cannot be examined here: give --num-blocks")
        num_blocks = int(gib * 2**30) // block_bytes
    is_given, is_capped = num_blocks is not None, False
    if num_blocks is None:
        needed = sum(_blocks(one, block_size) + 1 for one in asked)
        largest = max(_blocks(one, block_size) for one in asked)
        num_blocks = max(min(needed, MOST_BLOCKS), largest) + 2
        is_capped = needed > num_blocks - 2
    size = None if block_bytes is None else num_blocks * block_bytes / 2**30
    return Cache(num_blocks, block_size, size, is_given, is_capped)


def _blocks(one: Asked, block_size: int) -> int:
    return -(-(len(one.token_ids) + len(one.answer_ids)) // block_size)


def _check_sizes(asked: Sequence[Asked], cache: Cache) -> None:
    there = cache.num_blocks - 1  # without vLLM's null block
    for one in asked:
        needed = _blocks(one, cache.block_size)
        if needed > there:
            raise LogError(
                f"{one.where} needs {needed:,} KV blocks of {cache.block_size} tokens, and there "
                f"are {max(there, 0):,}: raise --num-blocks or --kv-gib"
            )


def _rows(
    model: Model, asked: Sequence[Asked], arms: Sequence[Arm], cache: Cache, pace: Pace
) -> list[Row]:
    """A row for each arm; those that do the same are replayed once."""
    found: dict[str | None, Row] = {}
    # `exact` first: it often reuses nothing, as prefix caching alone, which is last.
    left = sorted(arms, key=lambda arm: (arm.policy is None, arm.policy != "exact"))
    while left:
        first, *others = left
        engine = _engine(model, first, cache)
        twins = [Twin(arm, first, engine.side, model.layers, cache.block_size) for arm in others]
        followed = twins if pace.is_one_by_one else []
        replayed = replay(engine, [first.sent(one) for one in asked], pace, followed)
        found[first.policy] = _summed(first.policy, asked, replayed)
        for twin in followed:
            if twin.agrees_with(replayed):
                policy = twin.arm.policy
                found[policy] = _summed(policy, asked, twin.replayed(replayed))
        left = [arm for arm in others if arm.policy not in found]
    return [found[arm.policy] for arm in arms]


def _engine(model: Model, arm: Arm, cache: Cache) -> ModellessEngine:
    from segreuse_tools.estimate.modelless_engine import ModellessEngine

    transfer = model.vllm_config.kv_transfer_config
    assert transfer is not None
    transfer.kv_connector_extra_config = arm.options.model_dump()
    engine = ModellessEngine(model.vllm_config, cache.num_blocks, cache.block_size)
    engine.side.learn(model.layers, {})
    return engine


def _summed(policy: str | None, asked: Sequence[Asked], found: Replayed) -> Row:
    reports = [report for report in found.reports if report is not None]
    computed = 0.0
    for one, prefix, report in zip(asked, found.prefix_tokens, found.reports, strict=True):
        share = 1.0 if report is None else report["computed_share"]
        computed += share * (len(one.token_ids) - prefix)
    reasons = Counter(report["bypass_reason"] for report in reports)
    return Row(
        policy=policy,
        prefix_tokens=sum(found.prefix_tokens),
        reused_tokens=sum(report["reused_tokens"] for report in reports),
        recomputed_tokens=sum(report["recomputed_tokens"] for report in reports),
        computed_tokens=round(computed, 1),
        reusing_requests=reasons.pop(None, 0),
        bypassed=dict(reasons.most_common()),
        is_planned=found.is_planned,
        evicted_blocks=found.evicted_blocks,
        preemptions=found.preemptions,
        most_blocks=found.most_blocks,
    )
