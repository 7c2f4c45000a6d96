# SPDX-License-Identifier: Apache-2.0
"""The recipe for nginx does what it says, and the suite measures what it claims to."""

import contextlib
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from bench.harness import BenchError
from bench.suites import router
from segreuse_tools.routing import HEADER, SESSION_HEADER, routing_headers

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx")


needs_vllm_router = pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed"
)


class Stub(ThreadingHTTPServer):
    """In the place of a server."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.go_on = threading.Event()
        self.in_time = False  # whether the first chunk arrived before the last was sent


ANSWER = {
    "id": "1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "kv_transfer_params": {"segreuse": {"reused_tokens": 3}},
}


class _Handler(BaseHTTPRequestHandler):
    server: Stub  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        self.server.asked.append(self.path)
        if self.path == "/stream":
            self._stream()
        elif body.startswith(b"{"):
            self.server.bodies.append(json.loads(body))
            self._answer(json.dumps(ANSWER).encode())
        else:
            self._answer(str(length).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        self.server.in_time = self.server.go_on.wait(5)
        self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    running = [Stub(), Stub()]
    for stub in running:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
    yield running
    for stub in running:
        stub.go_on.set()
        stub.shutdown()
        stub.server_close()


@pytest.fixture
def url(stubs: list[Stub]) -> Iterator[str]:
    with router.nginx([stub.url for stub in stubs]) as running:
        yield running.hashed


def shares(stubs: list[Stub]) -> list[int]:
    return [len(stub.asked) for stub in stubs]


@pytest.fixture
def vllm_router(stubs: list[Stub]) -> Iterator[str]:
    """The vLLM project's router, as docs/recipes.md starts it."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(2)]
        for it in free:
            it.bind(("127.0.0.1", 0))
        port, prometheus = (str(it.getsockname()[1]) for it in free)
    command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash"]
    command += ["--worker-urls", *(stub.url for stub in stubs), "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", port, "--prometheus-port", prometheus],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        router.wait_for(f"http://127.0.0.1:{port}/health", process, within_s=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


@needs_vllm_router
def test_vllms_own_router_hashes_its_header_and_passes_our_fields(
    vllm_router: str, stubs: list[Stub]
) -> None:
    extra = {"extra_keys": ["docs"], "vllm_xargs": {"segreuse_policy": "shift"}, "cache_salt": "s"}
    for name in "abcdef":
        before = shares(stubs)
        headers = routing_headers([name], "docs", SESSION_HEADER)
        for number in range(4):
            body = {"model": "m", "prompt": f"{name} {number}", "max_tokens": 1, **extra}
            answer = httpx.post(f"{vllm_router}/v1/completions", json=body, headers=headers)
            assert answer.json()["kv_transfer_params"] == ANSWER["kv_transfer_params"]
        added = [now - was for now, was in zip(shares(stubs), before, strict=True)]
        assert sorted(added) == [0, 4]
    assert min(shares(stubs)) > 0
    passed = [body for stub in stubs for body in stub.bodies]
    assert [{name: body.get(name) for name in extra} for body in passed] == [extra] * len(passed)


@needs_nginx
def test_equal_headers_reach_the_same_server(url: str, stubs: list[Stub]) -> None:
    for name in ("a", "b", "c", "d", "e", "f"):
        before = shares(stubs)
        for _ in range(5):
            httpx.post(f"{url}/v1/completions", content=b"x", headers={HEADER: name})
        added = [now - was for now, was in zip(shares(stubs), before, strict=True)]
        assert sorted(added) == [0, 5]
    assert min(shares(stubs)) > 0, "and others the other one"


@needs_nginx
def test_requests_without_it_are_spread(url: str, stubs: list[Stub]) -> None:
    for _ in range(60):
        httpx.post(f"{url}/v1/completions", content=b"x").raise_for_status()
    assert min(shares(stubs)) >= 12


@needs_nginx
def test_round_robin_goes_to_one_server_after_the_other(stubs: list[Stub]) -> None:
    with router.nginx([stub.url for stub in stubs]) as running:
        for number in range(1, 9):
            httpx.post(f"{running.round_robin}/v1/completions", content=b"x", headers={HEADER: "a"})
            assert sum(shares(stubs)) == number
            assert max(shares(stubs)) - min(shares(stubs)) <= 1


@needs_nginx
def test_long_prompts_pass_and_the_administrators_routes_do_not(
    url: str, stubs: list[Stub]
) -> None:
    length = 20 << 20
    assert httpx.post(f"{url}/v1/completions", content=b"x" * length).text == str(length)
    refused = httpx.post(f"{url}/plugins/segreuse/v1/disable", content=b"x")
    assert refused.status_code == 404
    assert sum(shares(stubs)) == 1


@needs_nginx
def test_tokens_are_passed_on_as_they_come(url: str, stubs: list[Stub]) -> None:
    with httpx.stream("POST", f"{url}/stream", content=b"x") as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == b"first"
        for stub in stubs:
            stub.go_on.set()
        assert b"".join(chunks) == b"last"
    assert any(stub.in_time for stub in stubs)


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BenchError, match="nginx-light"), router.nginx(["http://a", "http://b"]):
        pass


def test_addresses_are_all_that_is_changed_of_the_recipe() -> None:
    text = router.recipe(["http://127.0.0.1:81", "http://127.0.0.1:82"], "127.0.0.1:80")
    changed = [
        (ours.strip(), theirs.strip())
        for ours, theirs in zip(
            text.splitlines(), router.RECIPE.read_text().splitlines(), strict=True
        )
        if ours != theirs
    ]
    assert changed == [
        ("server 127.0.0.1:81;", "server 127.0.0.1:8001;"),
        ("server 127.0.0.1:82;", "server 127.0.0.1:8002;"),
        ("listen 127.0.0.1:80;", "listen 127.0.0.1:8000;"),
    ]


@pytest.mark.parametrize(("workload", "documents"), [("one", 1), ("four", 4), ("topic", 4)])
def test_requests_are_the_same_at_every_call(workload: str, documents: int) -> None:
    asked = router.requests(workload, 50)
    assert asked == router.requests(workload, 50)
    assert all(len(set(it.documents)) == documents for it in asked)
    if workload == "topic":
        assert all(len({n // router.TOPIC for n in it.documents}) == 1 for it in asked)
        topics = {it.session: it.documents[0] // router.TOPIC for it in asked}
        assert all(topics[it.session] == it.documents[0] // router.TOPIC for it in asked)
        assert len(topics) > len({*topics.values()}), "some have the same topic"


def test_popular_documents_are_asked_for_more_often() -> None:
    asked = [it.documents[0] for it in router.requests("one", 2000)]
    assert asked.count(0) / 2000 == pytest.approx(0.224, abs=0.04)  # 1 / (1 + 1/2 + ... + 1/48)
    assert asked.count(0) > 1.5 * asked.count(1) > asked.count(7)


def test_headers_name_documents_their_topic_or_the_session() -> None:
    first, same_topic, other = (router.Request([n], [], []) for n in (0, 7, 8))
    assert router.headers_of(first, "none") == router.headers_of(first, "round_robin") == {}
    headers: Callable[..., Any] = router.headers_of
    assert headers(first, "documents") != headers(same_topic, "documents")
    assert headers(first, "topic") == headers(same_topic, "topic") != headers(other, "topic")
    same_session = other._replace(session=first.session)
    assert headers(first, "session") == headers(same_session, "session")
    assert headers(first, "session") != headers(first._replace(session=1), "session")


ROUTER = router.Router("http://hashed", "http://by-turns")


class Asked:
    """In the place of a server that reuses half of every document."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.admitted = 0

    def read(self, path: str) -> str:
        labels = 'engine="0",model_name="m",outcome="reused",reason=""'
        return f"vllm:segreuse_requests_total{{{labels}}} {float(self.admitted)}\n"


def test_a_row_counts_what_was_reused_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    running: Any = [Asked("http://a"), Asked("http://b")]
    sent = []

    def ask(client: Any, request: Any, documents: Any, headers: Any) -> Any:
        assert str(client.base_url) == ROUTER.hashed
        sent.append((request, headers))
        running[len(sent) % 4 == 0].admitted += 1
        return {"reused_tokens": 200, "prefix_tokens": 56}

    reset: list[Any] = []
    monkeypatch.setattr(router, "reset", reset.append)
    monkeypatch.setattr(router, "_ask", ask)
    row = router.measure("one", "documents", ROUTER, running, 8)
    assert reset == [running]
    assert [request for request, _ in sent] == router.requests("one", 8)
    assert all(headers for _, headers in sent)
    assert (row["reused_share"], row["busiest_share"]) == (0.5, 0.75)
    assert row["requests_by_server"] == [6, 2]
    summary = router.summary_of([row])
    assert summary == {
        "reused_share_one_documents": 0.5,
        "busiest_share_one_documents": 0.75,
        "requests": 8,
    }


def test_requests_that_were_not_admitted_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    running: Any = [Asked("http://a"), Asked("http://b")]
    monkeypatch.setattr(router, "reset", lambda _: None)
    monkeypatch.setattr(router, "_ask", lambda *_: {"reused_tokens": 0, "prefix_tokens": 0})
    with pytest.raises(BenchError, match="8 requests were sent, and 0 admitted"):
        router.measure("one", "none", ROUTER, running, 8)
