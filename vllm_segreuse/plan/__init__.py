# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side hands to the workers: which KV is reused, and how the rest is computed.

Free of torch and vLLM: policies and the planner run in the scheduler's process.
"""

from vllm_segreuse.plan.arrays import BoolArray, IntArray
from vllm_segreuse.plan.freezing import FreezeOrder
from vllm_segreuse.plan.pieces import reused_mask, segment_starts
from vllm_segreuse.plan.reuse import Recipe, ReusePlan, Score

__all__ = [
    "BoolArray",
    "FreezeOrder",
    "IntArray",
    "Recipe",
    "ReusePlan",
    "Score",
    "reused_mask",
    "segment_starts",
]
