# SPDX-License-Identifier: Apache-2.0
"""Options of a request are checked, and a top-level extra_keys moves to where vLLM passes it on."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from fastapi.testclient import TestClient
from starlette.routing import Route
from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.exceptions import VLLMValidationError

from tests.serve.vllm_app import ANTHROPIC, GENERATE, KINDS, MESSAGES, make_app
from vllm_segreuse.compat import openai_protocols
from vllm_segreuse.compat.api_server import _register_api_routers
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.parsing import parse_request
from vllm_segreuse.options.values import short_repr
from vllm_segreuse.serve.application import registered
from vllm_segreuse.serve.requests import (
    ENDPOINTS,
    NOT_HERE,
    admit_body,
    check_extra_args,
    refuse_unread,
)

endpoints = pytest.mark.parametrize("endpoint", KINDS)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(make_app())


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


def test_bodies_of_anthropic_clients_are_checked(client: TestClient) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": MESSAGES}
    response = client.post(ANTHROPIC, json={**body, "extra_keys": "a"})
    assert response.json() == {**body, "vllm_xargs": {"extra_keys": ["a"]}}
    response = client.post(ANTHROPIC, json={**body, "extra_keys": 5})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "extra_keys"


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
@pytest.mark.parametrize("option", ["recompute_ratio", "max_drift", "overflow_tokens"])
def test_null_reaches_the_sampling_parameters(
    client: TestClient, endpoint: str, option: str
) -> None:
    server = SegReuseConfig(recompute_ratio=0.5, max_drift=1.0, overflow_tokens=3)
    seen = xargs_seen(client, endpoint, {"vllm_xargs": {f"segreuse_{option}": None}})
    options = parse_request(seen, server).options
    assert options == server.request_defaults().model_copy(update={option: None})


@pytest.mark.parametrize("option", ["min_reused_tokens", "policy", "observe"])
def test_null_is_400_where_an_option_has_none(client: TestClient, option: str) -> None:
    for null in (None, "null"):
        body = {"prompt": "hello", "vllm_xargs": {f"segreuse_{option}": null}}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert f"segreuse_{option}=None must be" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["a", "segreuse_documents"])
def test_null_of_others_is_vllms_to_refuse(client: TestClient, name: str) -> None:
    response = client.post("/v1/completions", json={"prompt": "hello", "vllm_xargs": {name: None}})
    assert response.status_code == 400
    assert f"vllm_xargs.{name}" in response.text


@endpoints
@pytest.mark.parametrize("xargs", [None, {"mine": [1, "b"]}])
def test_request_without_our_options_is_left_alone(
    client: TestClient, endpoint: str, xargs: Any
) -> None:
    assert xargs_seen(client, endpoint, {"vllm_xargs": xargs, "extra_keys": None}) == xargs


@endpoints
def test_similar_segments_may_be_asked_for_where_the_server_finds_them(endpoint: str) -> None:
    server = TestClient(make_app({"similarity": {"by_default": False}}))
    assert xargs_seen(server, endpoint, {"vllm_xargs": {"segreuse_similarity": 1}})


def test_elsewhere_that_is_400(client: TestClient) -> None:
    body = {"prompt": "hello", "vllm_xargs": {"segreuse_similarity": 1}}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "segreuse_similarity"


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
    ("segreuse_policy", {"segreuse_policy": "exact", "extra_keys": "a"}),
    ("segreuse_polcy", {"segreuse_polcy": None, "vllm_xargs": {"segreuse_policy": "exact"}}),
    (short_repr("segreuse_" + "a" * 10**6)[1:-1], {"segreuse_" + "a" * 10**6: 1}),
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
        websocket.send_json({"extra_args": {"extra_keys": "a"}})
        assert websocket.receive_json() == "accepted"


NO_PROMPTS = {
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/ping", "/scale_elastic_ep"),
    *("/is_scaling_elastic_ep", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/collective_rpc", "/sleep", "/release_kv_cache_memory", "/wake_up", "/pause", "/resume"),
    *("/abort_requests", "/inference/v1/abort_requests", "/init_weight_transfer_engine"),
    *("/shutdown_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update"),
    *("/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_checker"),
    *("/v1/responses/{response_id}/cancel", "/fault_tolerance/apply"),
}
"""Routes of vLLM's that take bodies without a prompt."""
ANY_BODY = {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}
"""They only count tokens, of whatever body."""
NO_JSON = {"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"}
"""Forms and messages of a connection, whose sampling parameters are vLLM's own."""
NOT_EVERYWHERE = {"/cohere/v2/chat", "/cohere/v2/chat/render", "/v1/decisions"}
"""Routes that need another package, and those of a later vLLM (0.33)."""


def vllms_routes(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """All of vLLM's, whatever model and mode they are for."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    app = FastAPI()
    app.state.args = SimpleNamespace(enable_scale_out=True, enable_fault_tolerance=True)
    register_api_routers(app.state.args, app, ("generate", "render", "transcription", "realtime"))
    for name in ("pooling", "classify", "scoring", "embed"):
        module = importlib.import_module(f"vllm.entrypoints.pooling.{name}.api_router")
        app.include_router(module.router)
    return app


def test_it_is_decided_what_every_route_of_vllms_does_with_our_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = vllms_routes(monkeypatch).routes
    takes = {
        route.path
        for route in routes
        if isinstance(route, APIWebSocketRoute)
        or (isinstance(route, Route) and route.methods & {"POST", "PUT", "PATCH"})
    }
    decided = [set(ENDPOINTS), set(NOT_HERE), NO_PROMPTS, ANY_BODY, NO_JSON]
    assert sum(map(len, decided)) == len(set.union(*decided)), "each in one way"
    assert takes - set.union(*decided) == set(), "decide what our keys mean there"
    gone = set.union(*decided) - takes - NOT_EVERYWHERE
    assert gone == set(), "vLLM has no such routes"


def test_every_endpoint_of_vllms_that_hands_options_on_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = {
        route.path: route.body_field.field_info.annotation
        for route in vllms_routes(monkeypatch).routes
        if isinstance(route, APIRoute) and route.body_field is not None
    }
    takes = {path for path, body in bodies.items() if "vllm_xargs" in _fields(body)}
    rendering = {path for path in takes if path.endswith("/render")}  # no engine behind it
    without_a_field = {"/v1/chat/completions/batch", "/invocations"}
    assert takes - rendering - NO_JSON == ENDPOINTS - without_a_field
    assert rendering <= NOT_HERE.keys()


def _fields(body: Any) -> Any:
    return getattr(body, "model_fields", {})


@pytest.mark.parametrize("key", ["extra_keys", "segreuse_policy"])
def test_keys_that_a_route_would_ignore_are_400_by_name(client: TestClient, key: str) -> None:
    body = {"extra_args": {}, "other": 1}
    answer = client.post(GENERATE, json=body | {key: "a"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == key
    assert "put them into sampling_params.extra_args" in error["message"]
    assert client.post(GENERATE, json=body | {key: None}).status_code == 200


@pytest.mark.parametrize(
    "request_",
    [
        ChatCompletionRequest(messages=MESSAGES, extra_keys="a"),
        CompletionRequest(prompt="x", extra_keys=["a"]),
        ResponsesRequest(input="x", segreuse_policy="shift"),
    ],
)
def test_keys_that_nobody_has_read_are_refused_before_the_engine(
    request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ChatCompletionRequest, CompletionRequest, ResponsesRequest
    for kind in (*texts, TranscriptionRequest, TranslationRequest):  # put back at the end
        monkeypatch.setattr(kind, "to_sampling_params", kind.to_sampling_params)
    openai_protocols.install(refuse_unread)
    with pytest.raises(VLLMValidationError, match="nobody has read the body: put them into vllm_x"):
        request_.to_sampling_params(4, {})
    other = type(request_).model_validate(request_.model_dump(exclude={*request_.model_extra}))
    assert other.to_sampling_params(4, {}).max_tokens


def test_application_that_drops_its_dependencies_is_refused() -> None:
    def vllm_routes(args: Any, app: FastAPI) -> None:
        app.router.dependencies.clear()
        app.post("/v1/completions")(lambda: None)

    with pytest.raises(RuntimeError, match="/v1/completions"):
        _register_api_routers(vllm_routes, registered)(None, FastAPI())


def test_check_extra_args() -> None:
    check_extra_args(None)
    check_extra_args({"extra_keys": "a", "segreuse_policy": "shift", "other": object()})
    with pytest.raises(ValueError, match="extra_keys=5") as caught:
        check_extra_args({"extra_keys": 5})
    assert isinstance(caught.value, VLLMValidationError), "the asynchronous engine wants its own"
