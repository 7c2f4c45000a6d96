# SPDX-License-Identifier: Apache-2.0
"""What leaves with a scheduling step."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_segreuse.plan import ReusePlan


class Step(NamedTuple):
    """What a scheduling step tells the workers.

    Attributes:
        plans: that leave with it.
        called_back: requests whose plan is dropped.
        messages: of features, by feature.
    """

    plans: list[ReusePlan]
    called_back: list[str]
    messages: dict[str, Any]
