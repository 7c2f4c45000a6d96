# SPDX-License-Identifier: Apache-2.0
"""A worker's half of the audit."""

from __future__ import annotations

from segreuse_extras.audit.messages import AuditDone, AuditOrders
from segreuse_extras.audit.recorder import Recorder
from vllm_segreuse.compat import sampler
from vllm_segreuse.prefill.feature import MakingWorker, WorkerFeature


class AuditRecording(WorkerFeature):
    """Of one worker, whose logits are seen from here on."""

    name = "audit"

    def __init__(self) -> None:
        self.recorder = Recorder()
        sampler.watch(self.recorder)

    def begin_step(self, message: AuditOrders | None) -> None:
        """vLLM may start loads after it has sampled, which would be too late to record."""
        if message is not None:
            self.recorder.take(message)

    def end_step(self) -> AuditDone | None:
        """What came of references."""
        results = self.recorder.take_results()
        return AuditDone(results) if results else None


def start(making: MakingWorker) -> AuditRecording:
    """That of a worker."""
    return AuditRecording()
