# SPDX-License-Identifier: Apache-2.0
"""An application built as vLLM builds its own, without an engine.

Endpoints of `KINDS` answer with their `vllm_xargs`; all go as far as vLLM's check of sampling
parameters. Nothing checks `GENERATE` and `BESIDE` earlier.
"""

from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from pydantic import ValidationError
from starlette.responses import JSONResponse
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

import vllm_segreuse
from vllm_segreuse.compat.api_server import _register_api_routers
from vllm_segreuse.compat.input_processor import _validate_params
from vllm_segreuse.serve.application import registered
from vllm_segreuse.serve.requests import check_params

MESSAGES = [{"role": "user", "content": "hello"}]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "hello"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES}),
    "/v1/chat/completions/batch": (BatchChatCompletionRequest, {"messages": [MESSAGES]}),
    "/v1/responses": (ResponsesRequest, {"input": "hello"}),
}
"""Endpoints, vLLM's models of their bodies, and the least of a body."""

INVOCATIONS = "/invocations"
"""Parses the body itself, as vLLM's does."""
ANTHROPIC = "/v1/messages"
"""Answers with the body as it comes, as "/elsewhere" does."""
GENERATE = "/inference/v1/generate"
"""Takes sampling parameters as they are."""
BESIDE = "/beside"
"""No route of FastAPI's: an application's dependencies are nothing to it."""


def make_app(options: dict[str, Any] | None = None, *, stock: bool = False) -> FastAPI:
    """The application of a server that was started with `options` of segment reuse.

    Args:
        stock: without segment reuse.
    """
    app = FastAPI()
    config = vllm_segreuse.kv_transfer_config(**(options or {}))
    model = SimpleNamespace(hf_config=SimpleNamespace())
    vllm_config = SimpleNamespace(kv_transfer_config=config, model_config=model)
    app.state.engine_client = SimpleNamespace(vllm_config=vllm_config)
    register = _vllm_routes if stock else _register_api_routers(_vllm_routes, registered)
    register(None, app)
    return app


def _vllm_routes(args: Any, app: FastAPI) -> None:
    router = APIRouter()

    def check(params: SamplingParams) -> None:
        validate = _validate_params(lambda self, params: None, check_params)
        validate(app.state.engine_client, params)

    def add(path: str, model: Any) -> None:
        async def endpoint(request: model, raw_request: Request) -> Any:
            if hasattr(request, "to_sampling_params"):
                check(request.to_sampling_params(4, {}))
            return {"xargs": request.vllm_xargs}

        router.post(path)(endpoint)

    for path, (model, _) in KINDS.items():
        add(path, model)

    @router.post(INVOCATIONS, dependencies=[Depends(validate_json_request)])
    async def invocations(raw_request: Request) -> Any:
        body = await raw_request.json()
        try:
            request = CompletionRequest.model_validate(body)
        except ValidationError:
            return JSONResponse({"error": "no handler"}, status_code=400)
        return {"xargs": request.vllm_xargs}

    @router.post(ANTHROPIC)
    @router.post("/elsewhere")
    async def elsewhere(raw_request: Request) -> Any:
        return await raw_request.json()

    @router.post(GENERATE)
    async def generate(body: dict[str, Any]) -> Any:
        check(SamplingParams(extra_args=body["extra_args"]))

    async def beside(raw_request: Request) -> JSONResponse:
        check(SamplingParams(extra_args=(await raw_request.json())["extra_args"]))
        return JSONResponse(None)

    @router.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        await websocket.accept()
        asked = await websocket.receive_json()
        try:
            check(SamplingParams(extra_args=asked["extra_args"]))
        except ValueError as error:
            await websocket.send_json(str(error))
        else:
            await websocket.send_json("accepted")
        await websocket.close()

    app.include_router(router)
    app.add_route(BESIDE, beside, methods=["POST"])
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)
