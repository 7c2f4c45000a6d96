# SPDX-License-Identifier: Apache-2.0
"""What one scheduling step may spend on reuse."""

from __future__ import annotations

LOOKUPS_PER_STEP = 16  # about 0.5 ms each for a long prompt, a few more for repetitive text


class StepBudget:
    """Tokens that the plans of a step compute, and prompts that it looks up.

    Once it is closed, nobody else is admitted in this step; vLLM's loop over the waiting requests
    ends, as it does when vLLM's own token budget is spent.

    Args:
        max_tokens: most tokens all plans of one step may compute. A single larger plan is admitted
            alone and runs in several chunks.

    Attributes:
        tokens: spent in this step.
        lookups: done in this step.
        closed: whether no further request may be admitted in this step.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.begin_step()

    def begin_step(self) -> None:
        """Everything is available again."""
        self.tokens = self.lookups = 0
        self.closed = False

    def close(self) -> None:
        """Admit no further request in this step."""
        self.closed = True

    @property
    def is_spent(self) -> bool:
        """Whether no other prompt may be looked up in this step."""
        return self.closed or self.tokens >= self._max_tokens or self.lookups >= LOOKUPS_PER_STEP

    def admits(self, tokens: int) -> bool:
        """Whether a plan that computes so many fits beside those of this step."""
        return not self.tokens or self.tokens + tokens <= self._max_tokens
