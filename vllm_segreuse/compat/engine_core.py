# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.engine.core.EngineCore`: calls into the scheduler's process, between two steps.

- API servers call methods of `EngineCore` by name between two steps (`call_utility_async`,
  vllm-project/vllm#13060); plugins have no other way to the scheduler: `collective_rpc` reaches
  workers only.
- `collective_rpc` is also the way by which weights are replaced, and vLLM leaves it to the caller
  to reset the prefix cache. Here a call that has changed weights resets it. If requests hold blocks
  just then, vLLM goes on with them, and the scheduler's half is told: it reuses nothing of before.
- An engine that is told to end goes on while its connector has work. Ours gives up what it would do
  in idle time, which may take minutes: vLLM kills the engine before that.
- An engine without work sleeps until a message comes. Ours may wake it, once it has been idle.

Obsolete when methods of the scheduler's connector can be called from the API server, and vLLM tells
connectors that weights have changed, and that the engine is to end. None filed that we know of;
endpoint plugins (vllm-project/vllm#46565) leave the engine's side to patches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_segreuse.compat.patching import add_method, wrap
from vllm_segreuse.compat.scheduler import abort_own, is_paused, scheduler_side

CHANGING = (
    *("reload_weights", "start_weight_update", "start_draft_weight_update", "update_weights"),
    *("finish_weight_update", "reset_weights", "load_model"),
)
"""Methods of vLLM's workers that change weights, or leave them unreadable. Of any other method, and
of functions, it is found out by comparing the weights of before and after."""

Digest = Callable[[Any], int]
"""A number for the weights of a model (`torch.nn.Module`), which is another one for others."""


def install(digest: Digest) -> None:
    """Give `EngineCore` the methods, and watch what it has its workers do, once.

    Args:
        digest: called in the workers.
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

    add_method(EngineCore, "segreuse_set_enabled", segreuse_set_enabled)
    add_method(EngineCore, "segreuse_status", segreuse_status)
    add_method(EngineCore, "segreuse_call", segreuse_call)
    wrap(EngineCore, "collective_rpc", _collective_rpc, digest)
    wrap(EngineCoreProc, "_handle_shutdown", _handle_shutdown)
    wrap(EngineCoreProc, "run_busy_loop", _run_busy_loop)
    wrap(DPEngineCoreProc, "run_busy_loop", _run_busy_loop)


def _run_busy_loop(original: Callable[..., None]) -> Callable[..., None]:
    from vllm.v1.engine import EngineCoreRequestType

    def run_busy_loop(self: Any) -> None:
        side = scheduler_side(self.scheduler.connector)
        if side is not None:
            wake = partial(self.input_queue.put_nowait, (EngineCoreRequestType.WAKEUP, None))
            side.steps_by(wake, partial(is_paused, self.scheduler))
        original(self)

    return run_busy_loop


def _handle_shutdown(original: Callable[..., bool]) -> Callable[..., bool]:
    def handle_shutdown(self: Any) -> bool:
        if not self.is_running():
            abort_own(self.scheduler)
        return original(self)

    return handle_shutdown


def _collective_rpc(original: Callable[..., Any], digest: Digest) -> Callable[..., Any]:
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        # While an engine starts it has no scheduler yet, or workers whose model is not loaded.
        scheduler = getattr(self, "scheduler", None)
        side = None if scheduler is None else scheduler_side(scheduler.get_kv_connector())
        if side is None:
            return original(self, method, *args, **kwargs)
        before = None if method in CHANGING else _digests(self, digest)
        try:
            return original(self, method, *args, **kwargs)
        finally:
            if before is None or _digests(self, digest) != before:
                _forget(scheduler, side)

    return collective_rpc


def _digests(core: Any, digest: Digest) -> list[Any] | None:
    """Of the models of all workers; None: they cannot be read. Those of an engine that sleeps are
    not there."""
    executor = core.model_executor
    if executor.is_sleeping:
        return None
    try:
        found = executor.collective_rpc(partial(_digest_of, digest))
    except Exception:  # the call before it may have left a worker that does not answer
        return None
    return None if None in found else list(found)


def _digest_of(digest: Digest, worker: Any) -> list[int] | None:
    """Of the model of a worker, and its draft; None: their weights cannot be read, as those that an
    update is about to bring."""
    try:
        models = worker.get_model(), worker.get_draft_model()
        return [digest(model) for model in models if model is not None]
    except Exception:
        return None


def _forget(scheduler: Any, side: Any) -> None:
    """KV that was computed before is that of other weights."""
    if not scheduler.reset_prefix_cache():
        side.weights_changed()


def segreuse_set_enabled(self: Any, enabled: bool | str) -> Any:
    """Turn reuse on or off for the requests to come, or observe them; returns the state."""
    return _side(self).set_enabled(enabled)


def segreuse_status(self: Any) -> dict[str, Any]:
    """What the status route shows."""
    return dict(_side(self).status())


def segreuse_call(self: Any, name: str, *args: Any) -> Any:
    """Ask a feature what it offers by this name."""
    return _side(self).call(name, *args)


def _side(core: Any) -> Any:
    connector = core.scheduler.get_kv_connector()
    side = scheduler_side(connector)
    if side is None:
        raise RuntimeError(
            f"this engine does not run segment reuse: its KV connector is {connector!r}"
        )
    return side
