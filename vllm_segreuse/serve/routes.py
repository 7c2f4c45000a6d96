# SPDX-License-Identifier: Apache-2.0
"""The kill switch over HTTP, part of the administrator's application (`admin.py`).

GET  /plugins/segreuse/v1/status
POST /plugins/segreuse/v1/enable
POST /plugins/segreuse/v1/disable
POST /plugins/segreuse/v1/observe
"""

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from vllm_segreuse.features.bodies import json_or_nothing
from vllm_segreuse.features.knowledge.scheduler_calls import call_scheduler
from vllm_segreuse.options import server
from vllm_segreuse.options.server import OBSERVE

router = APIRouter(tags=["switch"], dependencies=[Depends(json_or_nothing)])


class Switch(BaseModel):
    """Whether requests reuse segments; "observe": none does, and each reports what it would."""

    enabled: server.Switch


class SwitchStatus(Switch):
    """The switch, and the number of KV blocks that the segment index knows."""

    indexed_blocks: int


@router.get("/status")
async def status(request: Request) -> SwitchStatus:
    """Whether reuse is on."""
    return SwitchStatus(**await _call_engine(request, "segreuse_status"))


@router.post("/enable")
async def enable(request: Request) -> Switch:
    """Let requests reuse segments."""
    return Switch(enabled=await _call_engine(request, "segreuse_set_enabled", True))


@router.post("/disable")
async def disable(request: Request) -> Switch:
    """Let requests run as vLLM alone would, from the next step on."""
    return Switch(enabled=await _call_engine(request, "segreuse_set_enabled", False))


@router.post("/observe")
async def observe(request: Request) -> Switch:
    """Let requests run as vLLM alone would, and report what they would have reused."""
    return Switch(enabled=await _call_engine(request, "segreuse_set_enabled", OBSERVE))


async def _call_engine(request: Request, method: str, *args: Any) -> Any:
    return await call_scheduler(request.app.state.engine_client, method, *args)
