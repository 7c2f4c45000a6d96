# SPDX-License-Identifier: Apache-2.0
"""The administrator's application on an engine without a model."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from segreuse_extras.audit.audits import Audits
from segreuse_extras.audit.options import AuditOptions
from tests.knowledge.fake_engine import BLOCK_SIZE, FakeEngine
from vllm_segreuse.config.metrics import SegReuseStats
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.database import IN_MEMORY
from vllm_segreuse.features.knowledge.schemas import PREFIX
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.features.knowledge.store import Store
from vllm_segreuse.serve.admin import make_app, mounted

TOKEN = "admin"


class SwitchableEngine:
    """Stands for vLLM's engine client, as far as the kill switch needs it."""

    def __init__(self) -> None:
        self.engine_core = self

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if (method, *args) == ("segreuse_call", "audits"):
            return Audits(AuditOptions(), SegReuseStats(), _none, _none, _none, _none).status()
        return args[0] if args else {"enabled": True, "indexed_blocks": 0}


def _none(*_: Any) -> Any:
    raise AssertionError("nothing is audited here")


def admin_app(engine: FakeEngine | None = None) -> FastAPI:
    """All of it, behind the gate; the token is `TOKEN`."""
    admin = make_app()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        shape = Shape(BLOCK_SIZE, max_prompt_tokens=63, chunk_tokens=20)
        service = KnowledgeService(engine or FakeEngine(), Store(IN_MEMORY, "model"), shape)
        await service.start()
        admin.state.service = service
        admin.state.engine_client = SwitchableEngine()
        yield
        await service.close()

    app = FastAPI(lifespan=lifespan)
    app.state.admin = admin
    app.router.routes.extend(mounted(admin, TOKEN))
    return app


def send_case(client: Any, case: Any, headers: dict[str, str]) -> Any:
    """Send a case of schemathesis with a client of httpx's kind."""
    request = case.as_transport_kwargs(base_url=PREFIX)
    sent = {k: v for k, v in (request.get("headers") or {}).items() if k.lower() != "authorization"}
    if "json" in request:
        sent["Content-Type"] = "application/json"
    return client.request(
        request["method"],
        request["url"],
        params=request.get("params"),
        # The standard encoder: it escapes what is no UTF-8, and writes NaN.
        content=json.dumps(request["json"]) if "json" in request else request.get("data"),
        headers={**sent, **headers},
    )
