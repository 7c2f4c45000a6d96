# SPDX-License-Identifier: Apache-2.0
"""A route of greetings."""

from typing import Any

from fastapi import APIRouter, Request

from vllm_segreuse.features.knowledge.scheduler_calls import call_scheduler

router = APIRouter()


@router.get("/toy")
async def toy(request: Request) -> dict[str, Any]:
    """How many greetings are left."""
    found = await call_scheduler(request.app.state.engine_client, "segreuse_call", "toy")
    return dict(found)
