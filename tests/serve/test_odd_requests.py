# SPDX-License-Identifier: Apache-2.0
"""Whatever a client writes into a path, a query, a header, a cookie or a body: it gets a sentence.

Requests reach the applications as a server hands them on, so that no client mends them before.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import pytest
from fastapi import Depends, FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from segreuse_extras.trained import checks
from segreuse_extras.viewer.sessions import COOKIE
from tests.serve.test_documents import NAMES
from tests.serve.test_named import Service
from tests.viewer.served import TOKEN, UI, viewer_app
from vllm_segreuse.features.bodies import too_deep
from vllm_segreuse.features.knowledge.schemas import PREFIX
from vllm_segreuse.serve.requests import ENDPOINTS, admit

DIGITS = "9" * 5000
NESTED = "[" * 100_000
ODD = [
    *("", " ", "http://[", "http://[::1", "http://[x]:y", "http://\u2100.com", "http://a:b:c@d:e"),
    *(
        "null",
        "[",
        "]",
        ":",
        "//",
        "%",
        "%zz",
        "%ff%fe",
        "%00",
        "%ed%a0%80",
        "\0",
        "\\",
        '"',
        "\\9",
    ),
    *("\xe4\xff", "\x7f", "a" * 5000, DIGITS, f"-{DIGITS}", "1e999", "NaN", "-0", "\u0663", "1_0"),
    *("Bearer", "Bearer ", "Bearer  a b", "Basic eA==", "Basic %", f"bearer {TOKEN}x", "Digest a="),
    *('"\\777"', '"\\', "=;=;", "a=b=c", f"{COOKIE}=", f"{COOKIE}={DIGITS}.a.b", f"{COOKIE}=..."),
    *("application/json", "application/json; charset=utf-16", "a/b/c; ;=", "text/html", "gzip"),
]
JSON_VALUES = [
    *("{}", "[]", "null", "true", "1e999", "NaN", DIGITS, f'"{DIGITS}"', '"\\ud800"', '"\\u0000"'),
    *(
        '["\\udfff"]',
        '{"\\ud800": "\\ud800"}',
        '{"a": {"b": NaN}}',
        '["a", "a"]',
        '"a"',
        '"handbook"',
    ),
    *(
        '[{"base": "\\ud800", "id": "a"}]',
        '[{"base": "handbook", "id": "a"}]',
        '[{"text": "\\ud800"}]',
    ),
    *(
        f"{NESTED}{']' * 100_000}",
        "[" * 900 + "]" * 900,
        f"[{DIGITS}]",
        "-1",
        "0.5",
        '[{"id": "\\ud800"}]',
    ),
    *('[{"id": "a", "text": "b", "\\ud800": 1}]', '[{"id": "a", "text": "b"}]', '["handbook/a"]'),
]
"""Texts of JSON, some of which no parser takes."""

NAMES_OF_MEMBERS = [
    *(
        "name",
        "documents",
        "ids",
        "wait",
        "extra_key",
        "preamble",
        "context",
        "metadata",
        "messages",
    ),
    *(
        "extra_keys",
        "vllm_xargs",
        "segreuse_policy",
        "segreuse_\\ud800",
        "\\ud800",
        "prompt",
        "model",
    ),
]
MEMBERS_OF_XARGS = [
    *(
        "extra_keys",
        "segreuse_documents",
        "segreuse_policy",
        "segreuse_observe",
        "segreuse_\\ud800",
    ),
    *("segreuse_max_drift", "segreuse_dense_layers", "segreuse_min_reused_tokens", "\\ud800"),
]
HEADERS = [
    *("authorization", "x-api-key", "cookie", "origin", "host", "accept", "content-type", "range"),
    *("sec-fetch-site", "sec-fetch-mode", "content-length", "content-encoding", "x-request-id"),
    *("x-forwarded-proto", "traceparent", "tracestate", "x-session-id"),
]
PATHS = [
    *("/", "/status", "/enable", "/observe", "/audits", "/stats", "/openapi.json", "/nothing"),
    *("/knowledge-bases", "/knowledge-bases/base", "/knowledge-bases/base/documents"),
    *("/knowledge-bases/base/warm", "/knowledge-bases/base/documents/a"),
    *("/ui", "/ui/login", "/ui/logout", "/ui/requests", "/ui/requests/1", "/ui/static/viewer.css"),
    *("/ui/explain", "/ui/knowledge", "/ui/knowledge/base", "/ui/switch", "/ui/status"),
]
FORM = ["token", "form_key", "body", "api_key", "reuse", "to", "%ff", ""]


class Answer(NamedTuple):
    """What an application has sent."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Sent(NamedTuple):
    """A request, as a server hands it on."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def to(self, app: Any) -> Answer:
        """An error that an application leaves to its server is raised here."""
        raw_path = self.path.encode("utf-8", "surrogatepass")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": unquote_to_bytes(raw_path).decode(errors="replace"),
            "raw_path": raw_path,
            "root_path": "",
            "query_string": self.query,
            "headers": self.headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        received = iter([{"type": "http.request", "body": self.body, "more_body": False}])
        sent: list[Any] = []

        async def receive() -> Any:
            return next(received, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in sent)
        return Answer(sent[0]["status"], dict(sent[0]["headers"]), body)


odd = st.sampled_from(ODD) | st.text(st.characters(max_codepoint=255), max_size=20)


def objects(names: list[str], values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Texts of JSON objects."""
    members = st.dictionaries(st.sampled_from(names), values, max_size=4)
    return members.map(lambda found: "{" + ", ".join(f'"{k}": {v}' for k, v in found.items()) + "}")


values = st.sampled_from(JSON_VALUES) | objects(MEMBERS_OF_XARGS, st.sampled_from(JSON_VALUES))
json_bodies = objects(NAMES_OF_MEMBERS, values).map(lambda text: text.encode())
forms = st.dictionaries(st.sampled_from(FORM), odd | json_bodies.map(bytes.decode), max_size=4).map(
    lambda fields: "&".join(
        f"{k}={v if '%' in v else quote(v)}" for k, v in fields.items()
    ).encode()
)
headers = st.lists(
    st.tuples(
        st.sampled_from(HEADERS).map(str.encode),
        odd.map(lambda text: text.encode("latin-1", "replace")) | st.binary(max_size=30),
    ),
    max_size=5,
)
queries = st.binary(max_size=20) | st.builds(
    lambda name, value: f"{name}={value}".encode(),
    st.sampled_from(["after", "limit", "name", ""]),
    odd,
)
bodies = json_bodies | forms | st.binary(max_size=30) | odd.map(str.encode)
known = st.sampled_from(
    [(b"", b""), (b"authorization", f"Bearer {TOKEN}".encode()), (b"cookie", b"")]
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="module")
def admin(loop: asyncio.AbstractEventLoop) -> Iterator[FastAPI]:
    """The administrator's application; it has a base, a document, and a session."""
    app = viewer_app()
    running = app.router.lifespan_context(app)
    loop.run_until_complete(running.__aenter__())
    yield app
    loop.run_until_complete(running.__aexit__(None, None, None))


def session_of(app: FastAPI) -> bytes:
    return f"{COOKIE}={app.state.admin.state.sessions.begin(2e9)}".encode()


def check(answer: Answer, sent: Sent) -> None:
    """What an answer must be: no fault of the server, and text that says what is wrong."""
    assert answer.status < 500 or answer.status in (503, 507), (sent, answer)
    if answer.status < 400 or sent.method == "HEAD":
        return
    text = answer.body.decode()
    assert text, (sent, answer)
    assert "Traceback" not in text
    if answer.headers[b"content-type"] == b"application/json":
        error = json.loads(text)["error"]
        assert len(error["message"].split()) > 1, (sent, answer)
        assert len(text) < 20_000


@settings(suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "HEAD", "PUT"]),
    path=st.sampled_from(PATHS),
    tail=st.just("") | odd,
    query=queries,
    headers=headers,
    by=known,
    body=bodies,
)
def test_nothing_in_a_request_is_a_fault_of_the_administrators_routes(
    loop: asyncio.AbstractEventLoop,
    admin: FastAPI,
    method: str,
    path: str,
    tail: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    by: tuple[bytes, bytes],
    body: bytes,
) -> None:
    name, value = by
    asked = [(name, value or session_of(admin)), *headers] if name else headers
    sent = Sent(method, f"{PREFIX}{path}{tail}", query, asked, body)
    answer = loop.run_until_complete(sent.to(admin))
    check(answer, sent)
    if not name:
        assert answer.status in (401, 403, 413), (sent, answer)


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_no_single_header_is_a_fault(
    loop: asyncio.AbstractEventLoop, admin: FastAPI, value: str
) -> None:
    given = value.encode("latin-1", "replace")
    session = (b"cookie", session_of(admin))
    sent_form = (b"content-type", b"application/x-www-form-urlencoded")
    for header in (name.encode() for name in HEADERS):
        for method, path, more, body in (
            ("POST", f"{UI}/login", [sent_form], f"token={TOKEN}".encode()),
            ("POST", f"{UI}/login", [sent_form], b"token=x"),
            ("POST", f"{UI}/logout", [sent_form, session], b"form_key=x"),
            ("GET", f"{UI}/requests", [session], b""),
            ("GET", f"{UI}/requests", [], b""),
            ("GET", f"{PREFIX}/status", [], b""),
        ):
            sent = Sent(method, path, b"", [*more, (header, given)], body)
            check(loop.run_until_complete(sent.to(admin)), sent)


@pytest.fixture(scope="module")
def clients() -> Iterator[FastAPI]:
    """Routes that take extra keys, as far as our checks of them go; API keys have rights."""
    app = FastAPI(dependencies=[Depends(admit)])
    app.state.segreuse_namespaces = {"0" * 64: ("handbook",)}
    app.state.segreuse_model = object()
    app.state.segreuse_service = Service()
    for path in ENDPOINTS:
        app.post(path)(_nothing)
    app.add_exception_handler(RecursionError, too_deep)
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "names_of", lambda model: NAMES)
        yield app


def _nothing() -> None:
    """An endpoint."""


@settings(suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(sorted(ENDPOINTS)),
    query=queries,
    headers=headers,
    body=objects(NAMES_OF_MEMBERS, values).map(str.encode) | bodies,
)
def test_nothing_in_a_request_is_a_fault_of_our_checks(
    loop: asyncio.AbstractEventLoop,
    clients: FastAPI,
    path: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    sent = Sent("POST", path, query, headers, body)
    check(loop.run_until_complete(sent.to(clients)), sent)
