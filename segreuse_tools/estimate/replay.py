# SPDX-License-Identifier: Apache-2.0
"""Requests, one after the other or at their times, through an engine without a model."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_segreuse.compat.block_events import BlockListener

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from segreuse_tools.estimate.modelless_engine import ModellessEngine
    from segreuse_tools.estimate.prompt_rendering import Asked
    from segreuse_tools.estimate.twins import Twin
    from vllm_segreuse.plan import ModelLayers, ReusePlan

LEAST_STEP_S = 0.02
"""A step of an engine that replays arrival times takes at least so long."""


@dataclass(frozen=True)
class Pace:
    """When requests arrive, and what the engine does meanwhile.

    Attributes:
        layers: of the model.
        step_work: layer-tokens of one step, of plans that take several.
        concurrency: so many run at a time; the next arrives when one has ended.
        tokens_per_s: None: as above. Else requests arrive at their logged times, and the engine
            computes so many tokens in a second.
    """

    layers: ModelLayers
    step_work: int
    concurrency: int = 1
    tokens_per_s: float | None = None

    @property
    def is_one_by_one(self) -> bool:
        """Whether each request has ended before the next arrives."""
        return self.tokens_per_s is None and self.concurrency == 1


@dataclass
class Replayed:
    """What became of the requests.

    Attributes:
        prefix_tokens: of each request that has ended, found by prefix caching.
        reports: of each, as a server reports it; None: it has no extra keys.
        evicted_blocks: cached blocks that others needed.
        preemptions: how often the blocks of a running request were taken.
        most_blocks: that were held at a time.
        is_planned: whether workers might have computed more or less than was planned.
    """

    prefix_tokens: list[int]
    reports: list[dict[str, Any] | None]
    evicted_blocks: int = 0
    preemptions: int = 0
    most_blocks: int = 0
    is_planned: bool = False


class StuckError(RuntimeError):
    """No request goes on, and none has ended."""


def replay(
    engine: ModellessEngine, asked: Sequence[Asked], pace: Pace, twins: Sequence[Twin] = ()
) -> Replayed:
    """Run all requests to their ends.

    Args:
        engine: new, with vLLM's plain scheduler.
        asked: in the order of their arrival; with times, if they arrive at these.
        twins: are shown what arrives and what is planned.
    """
    return _Run(engine, asked, pace, twins).to_the_end()


class _Evictions(BlockListener):
    def __init__(self) -> None:
        self.count = 0

    def evicted(self, block_ids: Sequence[int]) -> None:
        self.count += len(block_ids)


@dataclass
class _Run:
    """See `replay`.

    Attributes:
        live: requests that have arrived and not ended, by id.
        spread: layer-tokens that are left of each spread plan, by request, oldest first.
        clock_s: of the requests' own times.
    """

    engine: ModellessEngine
    asked: Sequence[Asked]
    pace: Pace
    twins: Sequence[Twin]
    live: dict[str, Request] = field(default_factory=dict)
    spread: dict[str, int] = field(default_factory=dict)
    clock_s: float = -math.inf

    def __post_init__(self) -> None:
        self._coming = deque(range(len(self.asked)))
        self._evictions = _Evictions()
        self.engine.pool.listen(self._evictions)
        self._found = Replayed([0] * len(self.asked), [None] * len(self.asked))

    def to_the_end(self) -> Replayed:
        idle = 0
        while self._coming or self.live:
            for index in self.arriving():
                self._add(index)
            idle = 0 if self._step() else idle + 1
            if idle > 100:
                raise StuckError(f"none of {len(self.live)} requests goes on")
        self._found.evicted_blocks = self._evictions.count
        return self._found

    # Arrivals.

    def arriving(self) -> Iterator[int]:
        """Numbers of the requests that arrive now."""
        if self.pace.tokens_per_s is None:
            while self._coming and len(self.live) < self.pace.concurrency:
                yield self._coming.popleft()
            return
        if self._coming and not self.live:
            self.clock_s = max(self.clock_s, self._time_of(self._coming[0]))
        while self._coming and self._time_of(self._coming[0]) <= self.clock_s:
            yield self._coming.popleft()

    def _time_of(self, index: int) -> float:
        time_s = self.asked[index].time_s
        assert time_s is not None
        return time_s

    def _add(self, index: int) -> None:
        from vllm import SamplingParams

        one = self.asked[index]
        for twin in self.twins:
            twin.arrived(one)
        params = SamplingParams(
            max_tokens=len(one.answer_ids),
            extra_args=one.extra_args or None,
            prompt_logprobs=one.prompt_logprobs,
            detokenize=False,
        )
        request = self.engine.add(
            str(index),
            one.token_ids,
            params,
            cache_salt=one.cache_salt,
            priority=one.priority,
            session_id=one.session_id,
            arrival_time=float(index),
        )
        self.live[request.request_id] = request

    # Steps.

    def _step(self) -> bool:
        """One step of the engine; whether anything was done in it."""
        from segreuse_tools.estimate.modelless_engine import step_output

        scheduler = self.engine.scheduler
        step: SchedulerOutput = scheduler.schedule()
        pool = self.engine.pool
        held = pool.num_gpu_blocks - 1 - pool.num_free_blocks()
        self._found.most_blocks = max(self._found.most_blocks, held)
        self._found.preemptions += len(step.preempted_req_ids or ())
        metadata: Any = step.kv_connector_metadata
        work = self._begin(metadata.plans)
        loaded, spread_work = self.go_on()
        sampled = {name: self._next_tokens(name) for name in step.num_scheduled_tokens}
        outputs = scheduler.update_from_output(step, step_output(sampled, loaded))
        self._note([output for of_client in outputs.values() for output in of_client.outputs])
        if self.pace.tokens_per_s is not None:
            work += spread_work
            tokens = step.total_num_scheduled_tokens + work / self.pace.layers.in_all
            self.clock_s += max(LEAST_STEP_S, tokens / self.pace.tokens_per_s)
        return bool(step.num_scheduled_tokens or spread_work)

    def _begin(self, plans: list[ReusePlan]) -> int:
        """Work of the step's plans, in layer-tokens; what is spread is done later."""
        for plan in plans:
            for twin in self.twins:
                twin.planned(plan, int(plan.request_id), self.asked[int(plan.request_id)])
        self._found.is_planned |= any(plan.reports for plan in plans)
        work = {plan.request_id: plan.layer_tokens(self.pace.layers) for plan in plans}
        spread = [plan.request_id for plan in plans if plan.spread]
        self.spread |= {name: work.pop(name) for name in spread}
        return sum(work.values())

    def go_on(self) -> tuple[list[str], int]:
        """Requests whose spread plan is done, and what was carried out of all, in layer-tokens: the
        oldest plan first, a step's work in each step."""
        left, done = self.pace.step_work, []
        for name, work in list(self.spread.items()):
            part = min(left, work)
            left -= part
            self.spread[name] = work - part
            if part == work:
                del self.spread[name]
                done.append(name)
        return done, self.pace.step_work - left

    def _next_tokens(self, name: str) -> list[int]:
        """What is sampled for a request whose prompt is done.

        One request at a time is not waited for by others: all of its answer but the last token is
        generated at once, and computed in the next step.
        """
        request = self.live[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        left = self.asked[int(name)].answer_ids[request.num_output_tokens :]
        return left[:-1] if self.pace.is_one_by_one and len(left) > 1 else left[:1]

    def _note(self, outputs: list[Any]) -> None:
        for output in outputs:
            index = int(output.request_id)
            if output.prefill_stats is not None:
                stats = output.prefill_stats
                self._found.prefix_tokens[index] = stats.num_local_cached_tokens
            if output.finish_reason is not None:
                answer = output.kv_transfer_params
                self._found.reports[index] = answer["segreuse"] if answer else None
                del self.live[output.request_id]
