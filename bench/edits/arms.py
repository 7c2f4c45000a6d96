# SPDX-License-Identifier: Apache-2.0
"""Ways to serve an edited conversation, as `bench.agents.arms` has them for traces."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bench.agents.arms import NONE, PREFIX, Arm

SHIFT, DEFAULT, ONCE, WEIGHED = "shift", "default", "once", "weighed"
SHIFT_ONCE, SAME = "shift-once", "same"
SERVER: Mapping[str, Any] = MappingProxyType({"min_reused_tokens": 64})
"""Options of the server that all arms share."""

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            Arm(NONE, prefix=False),
            Arm(PREFIX),
            # What other engines' shifting of KV does.
            Arm(SHIFT, options={"policy": "shift"}),
            Arm(DEFAULT, options={}),
            Arm(ONCE, options={"recompute_once": 1}),
            Arm(SHIFT_ONCE, options={"policy": "shift", "recompute_once": 1}),
            Arm(WEIGHED, options={"weigh_turns": 1}),
            Arm(SAME, options={"context": "same"}),
        )
    }
)
