# SPDX-License-Identifier: Apache-2.0
"""How many slots of the KV cache vLLM takes for a request at a time.

Whoever counts free blocks before vLLM allocates has to count what it will ask for: a plan for which
there is too little room is dropped, and made again in the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KvSlots(NamedTuple):
    """Of one engine.

    Attributes:
        ahead: most slots behind a request's tokens: for the next token, for its drafts, and for
            those that a drafter writes behind these (`_spec_decode_step_blocks` and the padding of
            requests with one token to compute, in `v1/core/sched/scheduler.py`).
        max_tokens: of a sequence; nothing is written behind it.
    """

    ahead: int
    max_tokens: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Those of a configuration."""
        drafts = vllm_config.num_speculative_tokens + vllm_config.num_lookahead_tokens
        return cls(1 + drafts, vllm_config.model_config.max_model_len)

    def needed(self, num_tokens: int) -> int:
        """Slots of a request of so many tokens: all that vLLM may ask for in its first step."""
        return min(num_tokens + self.ahead, self.max_tokens)
