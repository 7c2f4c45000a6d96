# SPDX-License-Identifier: Apache-2.0
"""Tapes as a logits processor of vLLM."""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from bench.english.tape import tape_of


class Recorder(AdapterLogitsProcessor):
    """Records each request on the tape that it names; see `LLM(logits_processors=[Recorder])`."""

    def is_argmax_invariant(self) -> bool:
        """It is applied to greedy requests, too."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """What is applied to the logits `[vocabulary]` of each step of a request."""
        tape = tape_of(params.extra_args)
        if tape is None:
            return None

        def record(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            tape.record(logits)
            return logits

        return record
