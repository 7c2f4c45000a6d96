# SPDX-License-Identifier: Apache-2.0
"""The viewer on an engine without a model, behind a real port."""

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from segreuse_extras.viewer.recent import Recent, RecentRequest
from tests.explain.reports import REPORT, STRETCHES, TEXTS
from tests.knowledge.admin_app import TOKEN, SwitchableEngine, admin_app

T = TypeVar("T")

UI = "/plugins/segreuse/v1/ui"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
BODY = json.dumps({"model": "m", "prompt": "a prompt", "extra_keys": ["docs"]})


class Engine(SwitchableEngine):
    """Keeps the switch, and knows one tokenizer."""

    def __init__(self, servers: int = 1) -> None:
        super().__init__()
        self.enabled: Any = True
        parallel = SimpleNamespace(_api_process_count=servers)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.tokenizer = SimpleNamespace(decode=lambda ids: f"text of {ids[0]} and more")

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if method == "segreuse_call":
            return await super().call_utility_async(method, *args)
        if args:
            self.enabled = args[0]
            return self.enabled
        return {"enabled": self.enabled, "indexed_blocks": 812}


def viewer_app(keeps_text: bool = False, servers: int = 1) -> FastAPI:
    """vLLM's application as far as `explain` needs it, with the administrator's mounted."""
    app = admin_app()
    admin = app.state.admin
    admin.state.recent = Recent(50, keeps_text)
    admin.state.server = app
    app.state.sent = []

    @app.post("/v1/completions")
    async def complete(request: Request) -> Any:
        body = await request.json()
        app.state.sent.append((dict(request.headers), body))
        if body["prompt"] == "refused":
            return JSONResponse({"error": {"message": "no <model> m"}}, 404)
        report = REPORT
        if body["vllm_xargs"]["segreuse_observe"]:
            found = {"bypass_reason": "observed", "observed": REPORT}
            unknown = [each | {"recomputed": None} for each in STRETCHES]
            report = REPORT | found | {"explain": unknown}
        choice = {"prompt_token_ids": [*range(REPORT["prompt_tokens"])]}
        return {"kv_transfer_params": {"segreuse": report}, "choices": [choice]}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Any:
        first = (await request.json())["tokens"][0]
        starts = [each["start"] for each in STRETCHES]
        return {"prompt": TEXTS[starts.index(first)]}

    lifespan = app.router.lifespan_context

    def with_engine(app: FastAPI) -> Any:
        context = lifespan(app)

        class Both:
            async def __aenter__(self) -> Any:
                state = await context.__aenter__()
                admin.state.engine_client = Engine(servers)
                return state

            async def __aexit__(self, *error: Any) -> Any:
                return await context.__aexit__(*error)

        return Both()

    app.router.lifespan_context = with_engine
    return app


async def outputs(report: Any, gate: asyncio.Event | None = None, tokens: int = 2628) -> Any:
    """What the engine says of a request."""
    yield SimpleNamespace(kv_transfer_params=None, finished=False, prompt_token_ids=None)
    if gate is not None:
        await gate.wait()
    params = None if report is None else {"segreuse": report}
    yield SimpleNamespace(
        kv_transfer_params=params, finished=True, prompt_token_ids=[*range(tokens)]
    )


def run(work: Coroutine[Any, Any, T]) -> T:
    """Its result; in a thread, since Playwright has a loop of its own in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def handle(recent: Recent, request_id: str, report: Any = REPORT) -> RecentRequest:
    """A request comes and goes."""

    async def all_of_it() -> None:
        async for _ in recent.watch(request_id, outputs(report)):
            pass

    run(all_of_it())
    return recent.latest()[0]


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Address of the application on a free port of this machine."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)
