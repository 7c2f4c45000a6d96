# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half is made of."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.donors import Donors
from vllm_segreuse.scheduling.feature import Features
from vllm_segreuse.scheduling.methods import Methods
from vllm_segreuse.scheduling.planner import Planner
from vllm_segreuse.scheduling.reporting import Accounts


@dataclass(frozen=True)
class Parts:
    """One of each per engine.

    Attributes:
        core: what features share.
        methods: policies of requests.
        accounts: what requests did not have to compute.
        features: of the engine.
        donors: blocks that donate.
        planner: makes plans.
    """

    core: Core
    methods: Methods
    accounts: Accounts
    features: Features
    donors: Donors
    planner: Planner
