# SPDX-License-Identifier: Apache-2.0
"""What a feature does in a worker: the other half of `scheduling/feature.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.plan import Message, ReusePlan
from vllm_segreuse.prefill.executor import PassReport, SparsePrefill

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_segreuse.prefill.checks import Runtime


class WorkerFeature:
    """Nothing of what may be overridden.

    Attributes:
        name: of its messages, as in the scheduler's process.
    """

    name = ""

    def fact(self) -> Any:
        """What the scheduler's half has to know of the model; None: nothing."""
        return None

    def carried_out_by(self, prefill: SparsePrefill) -> SparsePrefill:
        """What carries plans out: `prefill`, or one that reads what this feature has, too."""
        return prefill

    def begin_step(self, message: Any) -> None:
        """Before anything else of a step.

        Args:
            message: from the scheduler's half; None: there is none.
        """

    def begin_plans(self, plans: Iterable[ReusePlan]) -> None:
        """These plans have left with the step."""

    def end_plans(self, request_ids: Iterable[str], report: PassReport) -> None:
        """Plans of these requests were carried out together."""

    def drop_plans(self, request_ids: Iterable[str]) -> None:
        """Plans of these requests, if they have any, are not carried out to the end."""

    def end_step(self) -> Message | None:
        """All of a step's plans are queued: the message to the scheduler's half; None: there is
        none."""
        return None

    def close(self) -> None:
        """The engine ends."""


@dataclass(frozen=True)
class MakingWorker:
    """What the halves of features are made from, in a worker.

    Attributes:
        vllm_config: the engine's.
        config: the server's options.
        kv_cache_config: vLLM's; the caches are bound to their layers.
        runtime: what was proven of the model.
    """

    vllm_config: VllmConfig
    config: ServerOptions
    kv_cache_config: KVCacheConfig
    runtime: Runtime
