# SPDX-License-Identifier: Apache-2.0
"""Audits over HTTP, part of the administrator's application.

GET  /plugins/segreuse/v1/audits
"""

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from vllm_segreuse.features.bodies import json_or_nothing
from vllm_segreuse.features.knowledge.scheduler_calls import call_scheduler

router = APIRouter(tags=["audits"], dependencies=[Depends(json_or_nothing)])


class DriftedNamespace(BaseModel):
    """A namespace whose audits were above `max_kl`: `above` of the last `audits`."""

    namespace: str
    namespace_class: str
    audits: int
    above: int
    recovers_s: float


class Compared(BaseModel):
    """An audit; the fields are those of the log."""

    time: float
    policy: str
    namespace_class: str
    namespace: str
    fallback: bool
    kl: float
    agreed_tokens: int
    compared_tokens: int


class AuditStatus(BaseModel):
    """Audits of the first engine since its start: what came of them, and the last ones."""

    share: float
    on_drift: str
    failed: bool
    under_way: int
    outcomes: dict[str, int]
    drifted: list[DriftedNamespace]
    recent: list[Compared]


@router.get("/audits")
async def audits(request: Request) -> AuditStatus:
    """What audits have found."""
    found = await call_scheduler(request.app.state.engine_client, "segreuse_call", "audits")
    return AuditStatus(**found)
