# SPDX-License-Identifier: Apache-2.0
"""The connector's half in the scheduler process: vLLM's requests and blocks on one side, the
planner on the other, and features (`features/`) around both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_segreuse.options.server import OBSERVE, Switch
from vllm_segreuse.plan import ModelLayers, PlanOutcome
from vllm_segreuse.scheduling.admission import Admission
from vllm_segreuse.scheduling.arrival import all_tokens
from vllm_segreuse.scheduling.errors import Errors, contained
from vllm_segreuse.scheduling.feature import Admitted, Ending, OwnRequests
from vllm_segreuse.scheduling.outcomes import Outcomes
from vllm_segreuse.scheduling.parts import Parts
from vllm_segreuse.scheduling.step import Step
from vllm_segreuse.scheduling.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

_COMPLETED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """One per engine.

    Args:
        parts: what it is made of (`config/in_scheduler.py`).

    Attributes:
        parts: as above.
        errors: of hooks end here.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._core, self._planner, self._accounts = parts.core, parts.planner, parts.accounts
        self._features = features = parts.features
        self.errors = Errors(parts.planner)
        self._waits, self._decided = features.having("waits"), features.having("decided")[::-1]
        self._allocated = features.having("allocated")
        self._end_step = features.having("end_step")
        self._pending = features.having("has_pending_work")
        self._holding, self._processing = features.having("holds"), features.having("processed")
        self._own = [it for it in features if isinstance(it, OwnRequests)]
        self._admission, self._outcomes = Admission(parts), Outcomes(parts, self.errors)
        self._called_back: list[str] = []
        self.set_enabled(parts.core.config.starts_enabled)

    # The administrator.

    def set_enabled(self, enabled: Switch) -> Switch:
        """Kill switch. Off: no request reuses anything; donors keep being indexed. `OBSERVE`: what
        requests would reuse is planned and reported."""
        self._planner.enabled, self._planner.observes = bool(enabled), enabled == OBSERVE
        return enabled

    def status(self) -> dict[str, Any]:
        """What the status route shows."""
        enabled = OBSERVE if self._planner.observes else self._planner.enabled
        shown = {"enabled": enabled, "indexed_blocks": len(self._core.index)}
        for feature in self._features:
            shown |= feature.status()
        return shown

    def call(self, name: str, *args: Any) -> Any:
        """What an API server asks of a feature; see `Feature.calls`."""
        for feature in self._features:
            if name in feature.calls:
                return feature.calls[name](*args)
        raise ValueError(f"no feature of this engine answers {name!r}")

    # Requests.

    @contained(otherwise=None)
    def add(self, request: Request) -> None:
        """A request arrived; one without extra keys is ignored."""
        self._admission.arrive(request)

    def match(self, request: Request, num_hit_tokens: int) -> tuple[int | None, bool]:
        """Tokens to supply behind vLLM's prefix hit, None to decide in a later step; and whether
        that takes several steps."""
        if self._planner.admission_closed:
            return 0, False
        tracked = self._planner.get(request.request_id)
        for feature in self._waits:
            with self.errors.cost(request, feature.name):
                if feature.waits(request, tracked, num_hit_tokens):
                    return None, False
        if tracked is None:
            return 0, False
        supplied: int | None = self._decide(request, tracked, num_hit_tokens)
        if not self._planner.admission_closed:
            for feature in self._decided:
                try:
                    supplied = feature.decided(request, tracked, supplied)
                except Exception:
                    self.errors.give_up(request, feature.name)
                    supplied = None  # one that needs its documents must not run: it ends next
        plan = tracked.plan if supplied else None  # after an error it may be an earlier one
        return supplied, plan is not None and plan.spread

    @contained(otherwise=0)
    def _decide(self, request: Request, tracked: TrackedRequest, num_hit_tokens: int) -> int | None:
        if request.num_tokens != tracked.num_tokens:  # it was preempted
            tracked.prompt = tracked.prompt.with_tokens(all_tokens(request))
        prefix = functools.partial(
            self._core.pool.prefix_state,
            request,
            num_hit_tokens,
            self._core.slots.needed(request.num_tokens),
            self._core.manager.watermark_blocks,
            tracked.left_behind.block_ids,
        )
        return self._planner.decide(tracked, num_hit_tokens, request.num_tokens, prefix)

    @contained(otherwise=None)
    def leave(self, request: Request) -> None:
        """Another connector supplies the request: it has no plan, and donates nothing."""
        self._planner.leave(request.request_id)

    def holds(self, request_id: str) -> bool:
        """Whether others read or write a request's blocks, so that they cannot be taken from it."""
        return any(feature.holds(request_id) for feature in self._holding)

    @contained(otherwise=None)
    def allocated(
        self, request: Request, block_ids: list[int], others: Sequence[list[int]] = ()
    ) -> None:
        """vLLM allocated the request's blocks: it runs in this step, or is set aside for its plan.

        Called once more when its spread plan is done and it runs.

        Args:
            block_ids: of the group that segments are found in.
            others: in each of the other groups.
        """
        tracked = self._planner.get(request.request_id)
        if tracked is None or request.num_computed_tokens:
            return
        report = self._planner.allocated(tracked, block_ids)
        if others and tracked.plan is not None:
            tracked.plan.others = self._core.other_tables(tracked.plan, others)
        hit_blocks = block_ids[: report.prefix_tokens // self._core.block_size]
        with self.errors.cost(request, "the index"):  # features hear of its plan all the same
            self.parts.donors.index_prefix(tracked, request.all_token_ids, hit_blocks)
        is_first = not request.num_preemptions
        if is_first:  # counted when it was first admitted, like vLLM's own figures
            with self.errors.cost(request, "accounts"):
                self._accounts.admitted(tracked, request, report)
        admitted = Admitted(request, tracked, report, block_ids, hit_blocks, is_first)
        for feature in self._allocated:
            with self.errors.cost(request, feature.name):
                feature.allocated(admitted)

    @contained(otherwise=0)
    def saved_tokens(self, request: Request) -> int:
        """Tokens of the request's plan that are not computed."""
        tracked = self._planner.get(request.request_id)
        plan = None if tracked is None else tracked.plan
        return 0 if plan is None else plan.num_restored + plan.num_reused - plan.num_recomputed

    def call_back(self, request: Request) -> None:
        """vLLM takes the blocks from a request whose spread plan is under way, or just done.

        It reuses nothing from here on: a report on this plan may still come, and must not be taken
        for that of another.
        """
        self._planner.call_back(request.request_id)
        self._accounts.forget(request.request_id)
        for feature in self._features:
            feature.called_back(request.request_id)
        self._called_back.append(request.request_id)

    @contained(otherwise=None)
    def finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        """The request ended, in whatever way; its report if it was ever admitted.

        Args:
            block_ids: its blocks, which it still holds.
        """
        self._accounts.forget(request.request_id)
        tracked = None
        with self.errors.cost(request, "the planner"):
            tracked = self._planner.remove(request.request_id)
        ending = Ending(request, tracked, block_ids, request.status in _COMPLETED)
        if tracked is not None and tracked.report is not None:
            ending.report = {
                "policy": tracked.method.policy,
                "prompt_tokens": request.num_prompt_tokens,
                **tracked.report.shown(),
            }
        for feature in self._features:  # whatever happens: what is held for it ends with it
            with self.errors.cost(request, feature.name):
                feature.finished(ending)
        if tracked is not None:
            self._core.namespaces.release(tracked.prompt.namespace)
        return ending.report

    # Steps.

    def take_step(self, runs_model: bool) -> Step:
        """The scheduling step is over, whether or not it has a forward (`runs_model`)."""
        plans = self._planner.take_plans()
        self.parts.donors.begin_step()
        self._core.pool.begin_step()
        messages = {}
        for feature in self._end_step:
            with self._core.health.contained(f"the end of a step of {feature.name}"):
                message = feature.end_step(plans, runs_model)
                if message is not None:
                    messages[feature.name] = message
        called_back, self._called_back = self._called_back, []
        return Step(plans, called_back, messages)

    def processed(self) -> None:
        """The oldest step that is under way is over."""
        for feature in self._processing:
            with self._core.health.contained(f"the end of a step of {feature.name}"):
                feature.processed()

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine has to step although no request needs it."""
        return any(feature.has_pending_work() for feature in self._pending)

    def reported(
        self,
        messages: Mapping[str, Any],
        outcomes: Mapping[str, PlanOutcome],
        requests: Mapping[str, Request],
    ) -> None:
        """The workers report.

        Args:
            messages: to features.
            outcomes: how plans have ended, by request.
            requests: of vLLM's scheduler, by id; who has ended is not among them.
        """
        for feature in self._features:
            if feature.name in messages:
                with self._core.health.contained(f"what workers report to {feature.name}"):
                    feature.reported(messages[feature.name])
        self._outcomes.reported(outcomes, requests)

    # Requests of our own.

    def take_requests(self, running: int, waiting: int, is_paused: bool) -> list[Request]:
        """A step is over: requests that are to be added to the engine (`OwnRequests.to_add`)."""
        return self._asked(lambda it: it.to_add(running, waiting, is_paused))

    def take_failed(self) -> list[str]:
        """A step is over: requests that are to be ended with an error."""
        return self._asked(lambda it: it.to_fail())

    def resetting(self) -> list[str]:
        """The prefix cache is about to be reset, or the engine to end: requests to be aborted."""
        return self._asked(lambda it: it.to_abort())

    def steps_by(self, wake: Callable[[], None], is_paused: Callable[[], bool]) -> None:
        """The engine steps by itself, and sleeps while it is idle (`OwnRequests`)."""
        for feature in self._own:
            feature.wake, feature.is_paused = wake, is_paused

    def _asked(self, ask: Callable[[OwnRequests], Iterable[Any]]) -> list[Any]:
        found: list[Any] = []
        for feature in self._own:
            with self._core.health.contained("requests of our own"):
                found += ask(feature)
        return found

    # The engine.

    def weights_changed(self) -> None:
        """The model has other weights, and vLLM's prefix cache could not be reset: requests hold
        blocks."""
        self._core.health.weights_changed()

    def learn(self, layers: ModelLayers, facts: Mapping[str, Any]) -> None:
        """What the workers have found the model to be, before the first request.

        Args:
            layers: of the model.
            facts: for features, by feature.
        """
        self._accounts.layers = self.parts.methods.layers = layers
        for feature in self._features:
            if feature.name in facts:
                feature.learned(facts[feature.name])

    def close(self) -> None:
        """The engine ends."""
        for feature in self._features:
            feature.close()
