# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side hands to the workers: which KV is reused, and how the rest is computed.

Free of torch and vLLM: policies and the planner run in the scheduler's process.
"""

from vllm_segreuse.plan.arrays import BoolArray, Fates, FloatArray, IntArray
from vllm_segreuse.plan.check import NO_HALO, Check, Halo
from vllm_segreuse.plan.freezing import FreezeOrder
from vllm_segreuse.plan.images import Image, Images
from vllm_segreuse.plan.messages import Message
from vllm_segreuse.plan.outcome import AcceptanceOutcome, PlanOutcome
from vllm_segreuse.plan.pieces import ALL_LAYERS, Pieces, Segments, Tier
from vllm_segreuse.plan.programs import (
    Boundary,
    Counts,
    Deviation,
    Fixed,
    Gather,
    ModelLayers,
    Probed,
    Program,
    Staged,
    Stock,
)
from vllm_segreuse.plan.recipe import Fate, Recipe, fates_of
from vllm_segreuse.plan.reuse import TO_THE_END, OtherTable, Restoration, ReusePlan
from vllm_segreuse.plan.similar import for_similar, second_round, staged
from vllm_segreuse.plan.tiering import TierDone, TierOrders

__all__ = [
    "ALL_LAYERS",
    "NO_HALO",
    "TO_THE_END",
    "AcceptanceOutcome",
    "BoolArray",
    "Boundary",
    "Check",
    "Counts",
    "Deviation",
    "Fate",
    "Fates",
    "Fixed",
    "FloatArray",
    "FreezeOrder",
    "Gather",
    "Halo",
    "Image",
    "Images",
    "IntArray",
    "Message",
    "ModelLayers",
    "OtherTable",
    "Pieces",
    "PlanOutcome",
    "Probed",
    "Program",
    "Recipe",
    "Restoration",
    "ReusePlan",
    "Segments",
    "Staged",
    "Stock",
    "Tier",
    "TierDone",
    "TierOrders",
    "fates_of",
    "for_similar",
    "second_round",
    "staged",
]
