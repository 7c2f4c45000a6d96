# SPDX-License-Identifier: Apache-2.0
"""A short run of `http_fuzz` (thousands of requests are its long one), and that it can fail."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import harness
from tests.e2e import http_bodies, http_fuzz, http_load
from tests.e2e.http_malformed import HUGE_BYTES, Sent
from tests.e2e.server import Server

REQUESTS = 240


def test_nothing_a_client_sends_ends_in_5xx_or_stays_behind(shared_server: Server) -> None:
    prompts = http_fuzz.make_prompts()
    outcome = http_fuzz.fuzz(shared_server, prompts, REQUESTS, 0, pool_fills=True)
    assert not outcome.findings, "\n".join([*outcome.findings, str(outcome.memory_mb)])
    assert outcome.requests == REQUESTS
    assert outcome.statuses.keys() >= http_fuzz.MALFORMED
    assert outcome.beside.keys() >= {kind.__name__ for kind in http_load.KINDS}
    assert outcome.beside["reused"] > 0


def is_deep(content: bytes, headers: Mapping[str, str]) -> bool:
    try:
        json.loads(content)
    except RecursionError:
        return True
    except ValueError:
        pass
    return False


FAULTS: dict[str, Callable[[bytes, Mapping[str, str]], bool]] = {
    "depth": is_deep,
    "depth, but not as JSON": lambda content, headers: (
        "json" not in headers.get("Content-Type", "") and is_deep(content, headers)
    ),
    "no content type": lambda content, headers: "Content-Type" not in headers,
    "a charset": lambda content, headers: "charset" in headers.get("Content-Type", ""),
    "a content encoding": lambda content, headers: "Content-Encoding" in headers,
    "bytes that are no UTF-8": lambda content, headers: b"\xff" in content,
    "no bytes": lambda content, headers: not content,
    "a huge body": lambda content, headers: len(content) > HUGE_BYTES,
    "a body that was cut": lambda content, headers: content[:1] == b"{" and content[-1:] != b"}",
    "NaN": lambda content, headers: b"NaN" in content,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_trips_over_it_is_found_in_as_many_requests(fault: str) -> None:
    class Faulty:
        """A server that answers 500 to what it has a fault with."""

        def post(self, path: str, *, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
            return httpx.Response(500 if FAULTS[fault](content, headers) else 400)

    server: Any = Faulty()
    fuzz = http_fuzz.Fuzz(server, http_fuzz.make_prompts())
    fuzz.fixed()
    fuzz.malformed(REQUESTS // 2 - fuzz.total, 0)
    assert fuzz.failed
    assert fuzz.total == REQUESTS // 2
    assert all(FAULTS[fault](one.sent.content, one.sent.headers) for one in fuzz.failed)


def test_bodies_that_are_kept_show_in_memory() -> None:
    kept = 0

    class Leaking:
        """A server that forgets no body."""

        def post(self, path: str, *, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
            nonlocal kept
            kept += len(content)
            return httpx.Response(400)

    server: Any = Leaking()
    http_fuzz.Fuzz(server, []).malformed(REQUESTS // 2, 0)
    behind_the_first_third = kept / 2**20 * 2 / 3
    flat = [900.0] * (http_fuzz.PARTS - 1)
    assert http_fuzz.growth([*flat, 900.0 + behind_the_first_third], REQUESTS)


def test_a_wrong_answer_of_the_load_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(client: Any, prompt: str) -> bool:
        raise AssertionError("lost a choice")

    monkeypatch.setattr(http_load, "KINDS", (lies,))
    load = http_load.Load("http://127.0.0.1:9", ["a"])
    with load:
        while not load.findings:
            time.sleep(0.01)
    assert "lost a choice" in load.findings[0]


def test_what_vllm_alone_answers_as_badly_is_no_finding_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Alone:
        """vLLM without the plugin: it fails where the route says so, and once cannot be reached."""

        def __init__(self, *_: Any, stock: bool) -> None:
            assert stock

        def __enter__(self) -> "Alone":
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def post(self, path: str, **_: Any) -> httpx.Response:
            if path == "/gone":
                raise httpx.ReadError("reset")
            return httpx.Response(500 if path == "/both" else 400)

    monkeypatch.setattr(http_fuzz, "Server", Alone)
    failed = [http_fuzz.Failed(Sent(path, b"{}"), "500") for path in ("/both", "/ours", "/gone")]
    ours, alone = http_fuzz.ours_alone(failed)
    assert ["/ours" in one for one in ours] == [True]
    assert ["/both" in alone[0], "/gone" in alone[1]] == [True, True]


@pytest.mark.parametrize("path", sorted(http_bodies.SOUND))
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"max_tokens": None},
        {"max_tokens": 1e6},
        {"max_completion_tokens": 10**6},
        {"max_output_tokens": 1},
    ],
)
def test_no_body_asks_for_an_answer_that_fills_the_context(path: str, said: Any) -> None:
    nested = "sampling_params" in http_bodies.SOUND[path]("")
    body = http_fuzz.bounded(path, {"sampling_params": said} if nested else said)
    assert body["model"] == "m"
    read, sound = body, http_bodies.SOUND[path]("")
    if nested:
        read, sound = read["sampling_params"], sound["sampling_params"]
    own = http_fuzz.LIMITS & sound.keys()
    assert own
    assert all(0 < read[name] <= http_bodies.MOST_TOKENS for name in own)


@pytest.mark.parametrize("wrong", ["many", [], -1, False])
def test_a_limit_that_is_none_stays_as_wrong_as_it_was(wrong: Any) -> None:
    assert http_fuzz.bounded("/v1/completions", {"max_tokens": wrong})["max_tokens"] is wrong
    params = {"sampling_params": wrong}
    assert http_fuzz.bounded("/inference/v1/generate", params) == {**params, "model": "m"}


def test_growth_is_a_finding() -> None:
    flat = [900.0, 950.0, 951.0, 950.0, 952.0, 953.0]
    assert not http_fuzz.growth(flat, 100)
    assert http_fuzz.growth([*flat[:-1], 953.0 + http_fuzz.SLACK_MB], 100)


def test_the_file_counts_every_request_once(tmp_path: Path) -> None:
    statuses = {"/a": Counter({200: 3, 400: 2}), "/b": Counter({400: 1, http_fuzz.NO_ANSWER: 1})}
    beside = Counter({"stream": 5, "reused": 2})
    outcome = http_fuzz.Outcome(statuses, beside, [1.0, 2.0, 3.0, 4.0, 5.0, 6.5], ["bad"], [])
    file = tmp_path / "out.json"
    harness.write_json(file, "http_fuzz", {"commit": "abc"}, outcome.as_result())
    written = json.loads(file.read_text())
    assert written["rows"] == [
        {"route": "/a", "requests": 5, "0": 0, "200": 3, "400": 2},
        {"route": "/b", "requests": 2, "0": 1, "200": 0, "400": 1},
    ]
    assert written["summary"]["requests"] == 7
    assert written["summary"]["findings"] == 1
    assert written["summary"]["memory_growth_mb"] == 4.5
    assert (written["summary"]["requests_beside"], written["summary"]["reused_beside"]) == (5, 2)
