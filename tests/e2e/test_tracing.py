# SPDX-License-Identifier: Apache-2.0
"""Spans of the real server arrive at a receiver of OTLP, in the trace of whoever asked."""

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.shapes import make_model, passages
from tests.e2e.server import Server
from tests.reports import Whole

trace_service_pb2: Any = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="vLLM exports traces where OpenTelemetry is installed",
)

pytestmark = pytest.mark.slow("a server of its own, with a receiver", instead="test_tracing")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
DOCUMENT = next(text[:2500] for _, text in passages() if len(text) > 2500)


class Receiver(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []

    def of_trace(self) -> dict[str, Any]:
        """The spans of our trace so far, by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == TRACE}

    def wait_for(self, *names: str) -> dict[str, Any]:
        """The same, once there are these."""
        return _soon(lambda: set(names) <= self.of_trace().keys() and self.of_trace())


class _Handler(BaseHTTPRequestHandler):
    server: Receiver  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""


def _soon(found: Callable[[], Any], within_s: float = 20) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.2)
    raise AssertionError(f"not within {within_s} s")


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def server(receiver: Receiver) -> Iterator[Server]:
    endpoint = f"http://127.0.0.1:{receiver.server_address[1]}/v1/traces"
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    flags = ["--otlp-traces-endpoint", endpoint]
    with Server(make_model("qwen3"), flags, environment) as running:
        yield running


def values(span: Any) -> dict[str, Any]:
    kinds = ((it.key, it.value.WhichOneof("value"), it.value) for it in span.attributes)
    return {key: getattr(value, kind) for key, kind, value in kinds}


def test_match_and_pass_are_in_the_callers_trace(server: Server, receiver: Receiver) -> None:
    body = {"model": "m", "max_tokens": 2, "extra_keys": "docs"}
    server.post("/v1/completions", body | {"prompt": DOCUMENT}).raise_for_status()
    asked = body | {"prompt": "One. " + DOCUMENT + " What does it say?"}
    answer = server.post("/v1/completions", asked, headers=HEADERS).raise_for_status().json()
    report = Whole(answer["kv_transfer_params"]["segreuse"])
    found = receiver.wait_for("llm_request", "segreuse.match", "segreuse.plan", "segreuse.pass")
    assert {span.parent_span_id.hex() for span in found.values()} == {PARENT}
    assert len({span.span_id for span in found.values()}) == len(found)
    searched, carried_out = values(found["segreuse.match"]), values(found["segreuse.pass"])
    for name in ("policy", "prefix_tokens", "reused_tokens", "new_tokens", "matches"):
        assert searched[f"segreuse.{name}"] == report[name], name
    assert carried_out["segreuse.reused_tokens"] == report["reused_tokens"] > 0
    assert carried_out["segreuse.recomputed_tokens"] == report["recomputed_tokens"]
    assert carried_out["segreuse.drift"] == pytest.approx(report["drift"], abs=1e-4)
    whole = found["llm_request"]
    assert whole.start_time_unix_nano < found["segreuse.match"].start_time_unix_nano
    assert found["segreuse.match"].end_time_unix_nano <= found["segreuse.pass"].end_time_unix_nano
    assert found["segreuse.pass"].end_time_unix_nano < whole.end_time_unix_nano
    name = values(whole)["gen_ai.request.id"]
    assert searched["gen_ai.request.id"].startswith(name)
    assert carried_out["gen_ai.request.id"] == searched["gen_ai.request.id"]
