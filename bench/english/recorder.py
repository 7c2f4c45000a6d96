# SPDX-License-Identifier: Apache-2.0
"""The tape as a logits processor of vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from bench.english.tape import TAPE


class Recorder(LogitsProcessor):
    """vLLM's interface to `TAPE`; see `LLM(logits_processors=[Recorder])`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        """It is applied to greedy requests, too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """There is one request at a time, and nothing to keep of it."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`[requests, vocabulary]`: one request."""
        if len(logits) == 1:  # start-up samples for a full batch
            TAPE.record(logits[0])
        return logits
