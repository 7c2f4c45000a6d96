# SPDX-License-Identifier: Apache-2.0
"""Options of a request are checked, and a top-level extra_keys moves to where vLLM passes it on."""

import hashlib
from contextlib import nullcontext
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMValidationError

from vllm_segreuse.compat.api_server import _register_api_routers
from vllm_segreuse.config import bind_extra_keys
from vllm_segreuse.serve.origin import Origin, origin
from vllm_segreuse.serve.requests import admit_body, check_extra_args

MESSAGES = [{"role": "user", "content": "hello"}]
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "hello"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": MESSAGES}),
    "/v1/chat/completions/batch": (BatchChatCompletionRequest, {"messages": [MESSAGES]}),
    "/v1/responses": (ResponsesRequest, {"input": "hello"}),
}
endpoints = pytest.mark.parametrize("endpoint", KINDS)


def make_client() -> TestClient:
    """An application built as vLLM builds its own, whose endpoints answer with their vllm_xargs."""

    def vllm_routes(args: Any, app: FastAPI) -> None:
        router = APIRouter()

        def add(path: str, model: Any) -> None:
            async def endpoint(request: model, raw_request: Request) -> Any:
                return {"xargs": getattr(request, "vllm_xargs", None)}

            router.post(path)(endpoint)

        for path, (model, _) in KINDS.items():
            add(path, model)

        @router.post("/invocations")
        async def invocations(raw_request: Request) -> Any:
            return {"xargs": (await raw_request.json()).get("vllm_xargs")}

        @router.post("/elsewhere")
        async def elsewhere(raw_request: Request) -> Any:
            return await raw_request.json()

        @router.websocket("/v1/realtime")
        async def realtime(websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_json("hello")
            await websocket.close()

        app.include_router(router)
        app.state.args = type("Args", (), {"log_error_stack": False})()
        init_exception_handler(app)

    app = FastAPI()
    _register_api_routers(vllm_routes)(None, app)
    return TestClient(app)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return make_client()


def xargs_seen(client: TestClient, endpoint: str, options: dict[str, Any]) -> Any:
    response = client.post(endpoint, json={**KINDS[endpoint][1], **options})
    assert response.status_code == 200, response.text
    return response.json()["xargs"]


@endpoints
@pytest.mark.parametrize("value", ["a", ["a"]])
def test_top_level_keys_reach_vllm_xargs(client: TestClient, endpoint: str, value: Any) -> None:
    seen = xargs_seen(client, endpoint, {"extra_keys": value, "vllm_xargs": {"mine": 1}})
    assert seen == {"mine": 1, "extra_keys": ["a"]}


def test_they_reach_endpoints_that_parse_the_body_themselves(client: TestClient) -> None:
    response = client.post("/invocations", json={"prompt": "hello", "extra_keys": "a"})
    assert response.json() == {"xargs": {"extra_keys": ["a"]}}


def test_they_reach_the_sampling_parameters() -> None:
    body = {"prompt": "hello", "extra_keys": ["a", "b"]}
    admit_body(body)
    request = CompletionRequest.model_validate(body)
    assert request.to_sampling_params(4, {}).extra_args == {"extra_keys": ["a", "b"]}


def test_they_reach_every_conversation_of_a_batch() -> None:
    body = {"messages": [MESSAGES], "extra_keys": "a"}
    admit_body(body)
    single = BatchChatCompletionRequest.model_validate(body).to_chat_completion_request(MESSAGES)
    assert single.to_sampling_params(4, {}).extra_args == {"extra_keys": ["a"]}


@endpoints
@pytest.mark.parametrize("xargs", [None, {"mine": [1, "b"]}])
def test_request_without_our_options_is_left_alone(
    client: TestClient, endpoint: str, xargs: Any
) -> None:
    assert xargs_seen(client, endpoint, {"vllm_xargs": xargs, "extra_keys": None}) == xargs


BAD: list[tuple[str, dict[str, Any]]] = [
    ("extra_keys", {"extra_keys": 5}),
    ("extra_keys", {"extra_keys": []}),
    ("extra_keys", {"extra_keys": [["a"]]}),
    ("extra_keys", {"extra_keys": ["a"] * 10**5}),
    ("extra_keys", {"extra_keys": "x" * 2**20}),
    ("extra_keys", {"extra_keys": "a\u0000b"}),
    ("extra_keys", {"extra_keys": "a", "vllm_xargs": {"extra_keys": "a"}}),
    ("extra_keys", {"vllm_xargs": {"extra_keys": ""}}),
    ("extra_keys", {"vllm_xargs": {"extra_keys": [1]}}),
    ("extra_keys", {"vllm_xargs": {"extra_keys": [[]] * 10**5}}),
    ("segreuse_polcy", {"vllm_xargs": {"segreuse_polcy": "shift"}}),
    ("segreuse_policy", {"vllm_xargs": {"segreuse_policy": "fast"}}),
    ("segreuse_recompute_ratio", {"vllm_xargs": {"segreuse_recompute_ratio": 1.5}}),
    ("segreuse_dense_layers", {"vllm_xargs": {"segreuse_dense_layers": True}}),
    ("segreuse_min_reused_tokens", {"vllm_xargs": {"segreuse_min_reused_tokens": 0}}),
]


@endpoints
@pytest.mark.parametrize(("named", "options"), BAD, ids=[str(bad)[:60] for _, bad in BAD])
def test_01_02_06_bad_option_is_400_by_name(
    client: TestClient, endpoint: str, named: str, options: dict[str, Any]
) -> None:
    response = client.post(endpoint, json={**KINDS[endpoint][1], **options})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == named
    assert named in error["message"]
    assert len(error["message"]) < 400


def test_03_lone_surrogate_is_400(client: TestClient) -> None:
    content = b'{"prompt": "hello", "extra_keys": "\\ud800"}'
    headers = {"Content-Type": "application/json"}
    response = client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "extra_keys"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"5", b'{"vllm_xargs": 5}'])
def test_what_is_no_request_is_vllms_to_refuse(client: TestClient, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert "extra_keys" not in response.text


def test_other_routes_take_anything(client: TestClient) -> None:
    assert client.post("/elsewhere", json={"extra_keys": 5}).json() == {"extra_keys": 5}
    with client.websocket_connect("/v1/realtime") as websocket:
        assert websocket.receive_json() == "hello"


def test_application_that_drops_its_dependencies_is_refused() -> None:
    def vllm_routes(args: Any, app: FastAPI) -> None:
        app.router.dependencies.clear()
        app.post("/v1/completions")(lambda: None)

    with pytest.raises(RuntimeError, match="/v1/completions"):
        _register_api_routers(vllm_routes)(None, FastAPI())


def test_check_extra_args() -> None:
    check_extra_args(None)
    check_extra_args({"extra_keys": "a", "segreuse_policy": "shift", "other": object()})
    with pytest.raises(ValueError, match="extra_keys=5") as caught:
        check_extra_args({"extra_keys": 5})
    assert isinstance(caught.value, VLLMValidationError), "the asynchronous engine wants its own"


# Extra keys that are bound to API keys.

RIGHTS = {hashlib.sha256(b"alice").hexdigest(): ("handbook",)}


@pytest.fixture
def bound_client() -> TestClient:
    client = make_client()
    client.app.state.segreuse_namespaces = RIGHTS  # type: ignore[attr-defined]
    return client


@pytest.mark.parametrize("authorization", [None, "Bearer mallory", "Basic alice", "alice"])
def test_without_the_right_a_name_means_the_callers_own_namespace(
    bound_client: TestClient, authorization: str | None
) -> None:
    bound_client.headers["Authorization"] = "Bearer alice"
    options = {"extra_keys": "handbook"}
    assert xargs_seen(bound_client, "/v1/completions", options) == {"extra_keys": ["handbook"]}
    del bound_client.headers["Authorization"]
    if authorization is not None:
        bound_client.headers["Authorization"] = authorization
    api_key = (authorization or "").removeprefix("Bearer ") if authorization != "alice" else ""
    api_key = "" if authorization == "Basic alice" else api_key
    seen = xargs_seen(bound_client, "/v1/completions", options)
    assert seen == {"extra_keys": list(bind_extra_keys(("handbook",), api_key, RIGHTS))}
    options = {"extra_keys": "nobody has this one"}
    assert len(xargs_seen(bound_client, "/v1/completions", options)["extra_keys"]) == 2


def test_bound_or_not_a_client_cannot_write_a_bound_key(bound_client: TestClient) -> None:
    keys = list(bind_extra_keys(("handbook",), "alice", {}))
    body = {**KINDS["/v1/completions"][1], "extra_keys": keys}
    assert bound_client.post("/v1/completions", json=body).status_code == 400


@pytest.mark.parametrize(
    ("written_by", "refused"),
    [(Origin.PROGRAM, False), (Origin.CHECKED, False), (Origin.ENDPOINT, True)],
)
def test_endpoints_that_do_not_know_the_caller_take_no_bound_keys(
    written_by: Origin, refused: bool
) -> None:
    token = origin.set(written_by)
    try:
        check_extra_args({"extra_keys": ["a"]})
        check_extra_args({"other": 1}, bound=True)
        with pytest.raises(VLLMValidationError) if refused else nullcontext():
            check_extra_args({"extra_keys": ["a"]}, bound=True)
    finally:
        origin.reset(token)
