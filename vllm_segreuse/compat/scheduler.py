# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler (`v1/core/sched/scheduler.py`) does not do for a connector.

- What workers report to their connector is passed on last of all, when a request of one token has
  ended in the same step and its report has left. Here it is passed on first.
- A reset that preempts running requests raises if others are set aside for what they load: their
  blocks are held. Here their plans are called back, and they wait as if they had just arrived.
- Nor may they be called back while another engine reads or writes blocks.
- A connector cannot add requests or end one with an error. Here ours adds what audits and cold
  documents need, and ends requests that must not run without their documents.
- An answer may end among accepted drafts. vLLM 0.32 without asynchronous scheduling counts those
  behind the end as computed, and a streaming session takes their KV for that of its next part:
  blocks would get exact names, and donate, with the KV of other tokens. Here they are not counted.

Obsolete when the scheduler passes the workers' metadata (vllm-project/vllm#31964) to its connector
before requests end, a reset that preempts (vllm-project/vllm#28827) also preempts requests that
wait for remote KV, and vLLM 0.32, for which vllm-project/vllm#44526 reports the drafts, is no more
supported: 0.33 does not count them. None filed for the rest that we know of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap three methods of the scheduler, once. Other connectors see no change."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "update_from_output", _update_from_output)
    wrap(Scheduler, "reset_prefix_cache", _reset_prefix_cache)
    wrap(Scheduler, "_handle_stopped_request", _handle_stopped_request)


def scheduler_side(connector: Any) -> Any:
    """The scheduler's half of our connector (`SchedulerSide`); None for any other."""
    return getattr(connector, "scheduler_side", None)


def _update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        side = scheduler_side(self.connector)
        if side is not None:
            side.processed()
        output = model_runner_output.kv_connector_output
        if side is not None and output is not None:
            reported = output.kv_connector_worker_meta
            if reported is not None:
                side.reported(reported.messages, reported.outcomes, self.requests)
            if output.finished_recving:
                loaded = {i for i in output.finished_recving if _is_loading(self, i)}
                output.finished_recving = loaded
        # What the step has computed for them is no answer.
        failed = [] if side is None else _finish(self, side.take_failed())
        outputs = original(self, scheduler_output, model_runner_output, *args, **kwargs)
        if side is not None:
            running, waiting = self.get_request_counts()
            waiting -= self.num_waiting_for_streaming_input  # for their clients, not for the engine
            for request in side.take_requests(running, waiting, is_paused(self)):
                self.add_request(request)
            _report(failed + _finish(self, side.take_failed()), outputs)
        return outputs

    return update_from_output


def _handle_stopped_request(original: Callable[..., bool]) -> Callable[..., bool]:
    def handle_stopped_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> bool:
        # Only a session goes on from what it has computed.
        if (
            self.num_spec_tokens
            and request.resumable
            and scheduler_side(self.connector) is not None
        ):
            computed = request.num_computed_tokens - request.num_output_placeholders
            # Its last token was sampled, and is not computed yet.
            request.num_computed_tokens -= max(0, computed - (request.num_tokens - 1))
        return original(self, request, *args, **kwargs)

    return handle_stopped_request


def is_paused(scheduler: Any) -> bool:
    """Whether new requests, or all, have to wait."""
    from vllm.v1.core.sched.interface import PauseState

    return bool(scheduler.pause_state != PauseState.UNPAUSED)


def _finish(scheduler: Any, failed: list[str]) -> list[Any]:
    """End requests that must not run as they are, as vLLM ends those of a failed load."""
    if not failed:
        return []
    from vllm.v1.request import RequestStatus

    return list(scheduler.finish_requests(failed, RequestStatus.FINISHED_ERROR))


def _report(ended: list[Any], outputs: dict[int, Any]) -> None:
    """Add to a step's outputs, by client, that these requests have ended."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request in ended:
        found = outputs.setdefault(request.client_index, EngineCoreOutputs())
        reason = request.get_finished_reason()
        found.outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=reason))


def _is_loading(scheduler: Any, request_id: str) -> bool:
    """Whether vLLM waits for this request's plan; not once it was called back."""
    from vllm.v1.request import RequestStatus

    request = scheduler.requests.get(request_id)
    return request is not None and (
        request.is_finished() or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    )


def _reset_prefix_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset_prefix_cache(
        self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        side = abort_own(self)
        if reset_running_requests and side is not None and not _is_in_vain(self, side):
            _call_back(self, side)
        return original(self, reset_running_requests, *args, **kwargs)

    return reset_prefix_cache


def _is_in_vain(scheduler: Any, side: Any) -> bool:
    """Whether vLLM's reset fails whatever is called back: nobody's plan is, then.

    A streaming session that waits for its next part keeps its blocks; so does a request whose
    blocks another engine reads or writes, and one whose blocks vLLM frees late.
    """
    from vllm.v1.request import RequestStatus

    idle = RequestStatus.WAITING_FOR_STREAMING_REQ
    return (
        bool(scheduler.defer_block_free)
        or any(request.status == idle for request in scheduler.kv_holding_waiting)
        or any(side.holds(request_id) for request_id in scheduler.requests)
    )


def abort_own(scheduler: Any) -> Any:
    """Abort requests of our own that nobody waits for; returns the scheduler's half."""
    from vllm.v1.request import RequestStatus

    side = scheduler_side(scheduler.connector)
    if side is not None and (own := side.resetting()):
        scheduler.finish_requests(own, RequestStatus.FINISHED_ABORTED)
    return side


def _call_back(scheduler: Any, side: Any) -> None:
    """Take the blocks of all that is set aside, as after a load that failed
    (`Scheduler._update_waiting_for_remote_kv`).

    A step that has left may still write them. Whoever gets them next writes in a later one, before
    which the workers drop the plan.
    """
    from vllm.v1.request import RequestStatus

    for request in [r for r in scheduler.requests.values() if r.is_finished()]:
        scheduler._free_blocks(request)
    ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    for request in scheduler.kv_holding_waiting:
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS and (
            request.status not in ready or not request.num_computed_tokens
        ):
            continue
        side.call_back(request)
        scheduler.finished_recving_kv_req_ids.discard(request.request_id)
        scheduler.deferred_waiting.discard(request)
        scheduler._inflight_prefills.discard(request)
        scheduler._set_kv_fetch_stage(request, None)
        scheduler.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        # One that is ready keeps its status: a session that was preempted once, and whose next part
        # has arrived, is new to the workers.
        if request.status not in ready:
            preempted = request.num_preemptions > 0
            request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
