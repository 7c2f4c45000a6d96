# SPDX-License-Identifier: Apache-2.0
"""The kill switch wants its token, and answers bad requests with 4xx."""

import asyncio
import hmac
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.serve import admin
from vllm_segreuse.serve.admin import ADMIN_TOKEN_ENV, Gate, make_app, mount

TOKEN = "tökén"
MAX_BODY_BYTES = 2000
STATUS, ENABLE, DISABLE, OBSERVE, LOGIN = (
    f"/plugins/segreuse/v1/{x}" for x in ("status", "enable", "disable", "observe", "ui/login")
)


class Engine:
    """Stands for the engine client: remembers calls, keeps the switch."""

    def __init__(self) -> None:
        self.enabled = True
        self.calls: list[tuple[Any, ...]] = []
        self.engine_core = self

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if method == "segreuse_set_enabled":
            self.enabled = args[0]
            return self.enabled
        return {"enabled": self.enabled, "indexed_blocks": 3}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def client(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv(ADMIN_TOKEN_ENV, TOKEN)
    app = FastAPI()
    mounted = mount(app)
    assert mounted is not None
    mounted.state.engine_client = engine
    mounted.state.max_body_bytes = MAX_BODY_BYTES
    return TestClient(app)


def bearer(token: str) -> dict[str, bytes]:
    return {"Authorization": b"Bearer " + token.encode()}


def test_switch_and_status(client: TestClient, engine: Engine) -> None:
    headers = bearer(TOKEN)
    assert client.post(DISABLE, headers=headers).json() == {"enabled": False}
    assert client.get(STATUS, headers=headers).json() == {"enabled": False, "indexed_blocks": 3}
    assert client.post(OBSERVE, headers=headers).json() == {"enabled": "observe"}
    assert client.get(STATUS, headers=headers).json()["enabled"] == "observe"
    assert client.post(ENABLE, headers=headers).json() == {"enabled": True}
    assert engine.calls == [
        ("segreuse_set_enabled", False),
        ("segreuse_status",),
        ("segreuse_set_enabled", "observe"),
        ("segreuse_status",),
        ("segreuse_set_enabled", True),
    ]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Basic abc"}, {"Authorization": "Bearer "}]
)
def test_32_no_token_is_401(client: TestClient, engine: Engine, headers: dict[str, str]) -> None:
    for method, path in (("GET", STATUS), ("POST", ENABLE), ("POST", DISABLE)):
        assert client.request(method, path, headers=headers).status_code == 401
    assert engine.calls == []


def test_32_who_sends_no_token_is_told_how(client: TestClient) -> None:
    answer = client.get(STATUS)
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json() == {
        "error": {
            "type": "unauthorized",
            "message": "this route needs the admin token: Authorization: Bearer ...",
            "param": None,
        }
    }
    assert client.get(STATUS, headers=bearer("wrong")).json()["error"]["type"] == "forbidden"


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER  "])
def test_the_scheme_is_spelt_in_any_way(client: TestClient, scheme: bytes) -> None:
    headers = {"Authorization": scheme + TOKEN.encode()}
    assert client.get(STATUS, headers=headers).status_code == 200


def test_32_the_token_is_compared_in_constant_time(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)))
    assert client.get(STATUS, headers=bearer(TOKEN)).status_code == 403
    assert compared == [(TOKEN.encode(), TOKEN.encode())]


@pytest.mark.parametrize("token", ["wrong", TOKEN + "x", TOKEN[:-1], "x" * 10_000, "\xff"])
def test_32_wrong_token_is_403(client: TestClient, engine: Engine, token: str) -> None:
    assert client.post(DISABLE, headers=bearer(token)).status_code == 403
    assert engine.calls == []


@pytest.mark.parametrize("path", ["openapi.json", "nothing", "", "knowledge-bases", "a%0Ab"])
def test_32_every_path_below_the_prefix_wants_the_token(client: TestClient, path: str) -> None:
    for headers, status in ((None, 401), (bearer("wrong"), 403)):
        answer = client.get(f"/plugins/segreuse/v1/{path}", headers=headers)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"type", "message", "param"}


def test_without_the_service_of_knowledge_bases_its_routes_say_why(client: TestClient) -> None:
    answer = client.get("/plugins/segreuse/v1/knowledge-bases", headers=bearer(TOKEN))
    assert answer.status_code == 503
    assert "--api-server-count" in answer.json()["error"]["message"]


@pytest.mark.parametrize("headers", [{}, bearer(TOKEN)])
def test_32_a_websocket_is_refused(client: TestClient, headers: Any) -> None:
    with (
        pytest.raises(WebSocketDisconnect) as refused,
        client.websocket_connect("/plugins/segreuse/v1/status", headers=headers),
    ):
        raise AssertionError("it was accepted")
    assert refused.value.code == 1008


def test_32_wrong_method_is_405_and_odd_path_404(client: TestClient, engine: Engine) -> None:
    headers = bearer(TOKEN)
    assert client.get(DISABLE, headers=headers).status_code == 405
    assert client.delete(STATUS, headers=headers).status_code == 405
    assert client.get("/plugins/segreuse/v1/../../x", headers=headers).status_code == 404
    assert client.post("/plugins/segreuse/v2/enable", headers=headers).status_code == 404
    assert engine.calls == []


def test_32_large_body_is_413(client: TestClient, engine: Engine) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    answer = client.post(DISABLE, headers=bearer(TOKEN), content=body)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "too_large"
    assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]
    pieces = iter([b"x" * (MAX_BODY_BYTES // 2)] * 3)
    assert client.post(DISABLE, headers=bearer(TOKEN), content=pieces).status_code == 413
    assert engine.calls == []
    largest = b"1" + b" " * (MAX_BODY_BYTES - 1)
    assert client.post(DISABLE, headers=bearer(TOKEN), content=largest).status_code == 200
    pieces = iter([b"[1,", b"2", b"]"])
    assert client.post(DISABLE, headers=bearer(TOKEN), content=pieces).status_code == 200


class Behind:
    """An application that reads what it is sent, up to a number of messages."""

    def __init__(self, reads: int) -> None:
        self.state = SimpleNamespace(max_body_bytes=5)
        self.read: list[Any] = []
        self._reads = reads

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.read += [await receive() for _ in range(self._reads)]


def through_the_gate(app: Any, *messages: dict[str, Any]) -> list[Any]:
    """What is sent back, and with which status, to a request with the token."""
    waiting, sent = list(messages), []

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    scope = {"type": "http", "headers": [(b"AUTHORIZATION", b"Bearer token")]}
    asyncio.run(Gate(app, "token")(scope, receive, send))
    return sent


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


def test_32_a_body_arrives_whole_and_then_the_end_of_the_connection() -> None:
    app = Behind(reads=2)
    assert through_the_gate(app, part(b"ab", more=True), part(b"cde"), GONE) == []
    assert app.read == [part(b"abcde"), GONE]
    app = Behind(reads=1)
    assert through_the_gate(app, {"type": "http.request"}) == []
    assert app.read == [part(b"")]


def test_32_who_goes_while_the_body_comes_reaches_nothing() -> None:
    app = Behind(reads=1)
    assert through_the_gate(app, part(b"ab", more=True), GONE)[:1] == [413]
    assert through_the_gate(app, GONE)[:1] == [413]
    assert through_the_gate(app, part(b"abcdef"))[:1] == [413]
    assert through_the_gate(app, part(b"abcdef", more=True), part(b"ab"))[:1] == [413]
    assert app.read == []


def test_a_body_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MOST_DROPPED", 3)
    app = Behind(reads=1)
    assert through_the_gate(app, part(b"abcdefghi", more=True))[:1] == [413]
    assert app.read == []


def test_32_the_limit_is_the_servers_option_until_it_is_said() -> None:
    assert make_app().state.max_body_bytes == SegReuseConfig().knowledge_body_bytes


def test_32_errors_have_their_types(client: TestClient) -> None:
    headers = bearer(TOKEN)
    found = {
        answer.status_code: answer.json()["error"]["type"]
        for answer in (
            client.get(DISABLE, headers=headers),
            client.get("/plugins/segreuse/v1/nothing", headers=headers),
            client.post(ENABLE, headers=headers, content=b"{"),
        )
    }
    assert found == {
        400: "invalid_request",
        404: "not_found",
        405: "method_not_allowed",
    }


def test_32_a_stopped_engine_is_503(engine: Engine, client: TestClient) -> None:
    async def dead(method: str, *args: Any) -> Any:
        raise EngineDeadError

    engine.call_utility_async = dead  # type: ignore[method-assign]
    answer = client.post(DISABLE, headers=bearer(TOKEN))
    assert answer.status_code == 503
    assert "stopped" in answer.json()["error"]["message"]


def test_32_large_body_without_token_is_401(client: TestClient) -> None:
    assert client.post(DISABLE, content=b"x" * 10**6).status_code == 401


@pytest.mark.parametrize("token", [f"{TOKEN} ", f"{TOKEN}\n", f"\t {TOKEN}\r\n"])
def test_white_space_around_the_token_does_not_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """`VARIABLE="$(cat FILE)"` strips it, `--env-file` and secrets of Kubernetes do not."""
    monkeypatch.setenv(ADMIN_TOKEN_ENV, token)
    app = FastAPI()
    mounted = mount(app)
    assert mounted is not None
    mounted.state.engine_client = engine
    client = TestClient(app)
    for sent in (TOKEN, token.strip("\r\n")):
        assert client.get(STATUS, headers=bearer(sent)).status_code == 200
    for sent in (TOKEN, token):
        answer = client.post(LOGIN, data={"token": sent}, follow_redirects=False)
        assert answer.status_code == 303


def test_a_token_need_not_be_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "geheim-\udcff"  # as Python reads the byte 0xff of a variable
    monkeypatch.setenv(ADMIN_TOKEN_ENV, token)
    admin = mount(FastAPI())
    assert admin is not None
    given = {"headers": [(b"authorization", b"Bearer geheim-\xff")]}  # test clients send UTF-8
    assert Gate(admin, token).refusal(given) is None
    other = {"headers": [(b"authorization", b"Bearer geheim-\xfe")]}
    assert Gate(admin, token).refusal(other) is not None


@pytest.mark.parametrize("token", [None, "", " ", "\n"])
def test_32_no_routes_without_a_configured_token(
    monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.delenv(ADMIN_TOKEN_ENV, raising=False)
    if token is not None:
        monkeypatch.setenv(ADMIN_TOKEN_ENV, token)
    app = FastAPI()
    assert mount(app) is None
    assert TestClient(app).get(STATUS, headers=bearer("")).status_code == 404
