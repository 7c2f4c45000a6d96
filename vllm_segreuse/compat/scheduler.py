# SPDX-License-Identifier: Apache-2.0
"""Hand on what workers tell their connector before requests end by the same step.

`Scheduler.update_from_output` (`v1/core/sched/scheduler.py`) gives the connector its workers'
metadata last, when a request of one token has ended and its report has left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap `Scheduler.update_from_output`, once. Other connectors see no change."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "update_from_output", _update_from_output)


def _update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        told = model_runner_output.kv_connector_output
        metadata = told.kv_connector_worker_meta if told else None
        if metadata is not None and hasattr(self.connector, "worker_told"):
            self.connector.worker_told(metadata, self.requests)
        return original(self, scheduler_output, model_runner_output)

    return update_from_output
