# SPDX-License-Identifier: Apache-2.0
"""What a feature does in a worker: the other half of `scheduling/feature.py`."""

from __future__ import annotations

from typing import Any

from vllm_segreuse.plan import Message


class WorkerFeature:
    """Nothing of what may be overridden.

    Attributes:
        name: of its messages, as in the scheduler's process.
    """

    name = ""

    def begin_step(self, message: Any) -> None:
        """Before anything else of a step.

        Args:
            message: from the scheduler's half; None: there is none.
        """

    def end_step(self) -> Message | None:
        """All of a step's plans are queued: the message to the scheduler's half; None: there is
        none."""
        return None

    def close(self) -> None:
        """The engine ends."""
