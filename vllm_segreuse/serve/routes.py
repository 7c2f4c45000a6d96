# SPDX-License-Identifier: Apache-2.0
"""The kill switch over HTTP.

    GET  /plugins/segreuse/v1/status
    POST /plugins/segreuse/v1/enable
    POST /plugins/segreuse/v1/disable

The routes exist only where `VLLM_SEGREUSE_ADMIN_TOKEN` is set, and want it as a bearer token.
vLLM's `--api-key` guards other paths only, and is handed to every client.
"""

import hmac
import os
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from vllm.logger import init_logger

ADMIN_TOKEN_ENV = "VLLM_SEGREUSE_ADMIN_TOKEN"
PREFIX = "/plugins/segreuse/v1"
MAX_BODY_BYTES = 1024
"""None of the routes takes a body; what a client library may send all the same fits in this."""

logger = init_logger("vllm.segreuse")


def attach_router(app: FastAPI) -> None:
    """Mounts the routes on `app` if the environment holds an admin token."""
    token = os.environ.get(ADMIN_TOKEN_ENV, "")
    if token:
        app.include_router(make_router(token))
    else:
        logger.info("%s is not set: no route to switch segment reuse off", ADMIN_TOKEN_ENV)


def make_router(token: str) -> APIRouter:
    """The three routes, guarded by `token`."""
    secret = token.encode()

    async def authorise(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise HTTPException(401, "this route needs the admin token: Authorization: Bearer ...")
        # Headers are bytes that Starlette shows as Latin-1.
        if not hmac.compare_digest(given.strip().encode("latin-1"), secret):
            raise HTTPException(403, "this is not the admin token")

    router = APIRouter(
        prefix=PREFIX, dependencies=[Depends(authorise), Depends(_refuse_large_body)]
    )

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        return await _call_engine(request, "segreuse_status")

    @router.post("/enable")
    async def enable(request: Request) -> dict[str, Any]:
        return {"enabled": await _call_engine(request, "segreuse_set_enabled", True)}

    @router.post("/disable")
    async def disable(request: Request) -> dict[str, Any]:
        return {"enabled": await _call_engine(request, "segreuse_set_enabled", False)}

    return router


async def _refuse_large_body(request: Request) -> None:
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"this route takes no body beyond {MAX_BODY_BYTES} bytes")


async def _call_engine(request: Request, method: str, *args: Any) -> Any:
    """Calls a method of the scheduler's process (compat/engine_core.py), between two steps."""
    return await request.app.state.engine_client.engine_core.call_utility_async(method, *args)
