# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker for CPUs, with what it lacks for pipeline parallelism.

A runner makes the tensors that it receives from the stage before in its dummy run. The worker for
CPUs leaves that out for eager engines whose KV cache has a fixed size, and fails at its first step.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineWorker(CPUWorker):
    """`worker_cls`."""

    def load_model(self, **arguments: Any) -> None:
        super().load_model(**arguments)
        if not get_pp_group().is_first_rank:
            runner: Any = self.model_runner
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
