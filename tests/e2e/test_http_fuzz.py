# SPDX-License-Identifier: Apache-2.0
"""A short run of `http_fuzz` (thousands of requests are its long one), and that it can fail."""

import time
from typing import Any

import httpx
import pytest

from tests.e2e import http_fuzz, http_load
from tests.e2e.server import Server

REQUESTS = 60


def test_nothing_a_client_sends_ends_in_5xx_or_stays_behind(shared_server: Server) -> None:
    said: list[str] = []
    prompts = http_fuzz.make_prompts()
    findings = http_fuzz.fuzz(shared_server, prompts, REQUESTS, 0, said.append)
    assert not findings, "\n".join(findings + said)
    beside = next(line for line in said if "beside them" in line)
    for kind in http_load.KINDS:
        assert kind.__name__ in beside, beside
    assert "'reused': 0" not in beside


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
    said: list[str] = []
    failed = [http_fuzz.Failed(path, "{}", "500") for path in ("/both", "/ours", "/gone")]
    assert http_fuzz.ours_alone(failed, said.append) == ["/ours 500: {}"]
    assert ["/both" in said[0], "/gone" in said[1]] == [True, True]


def test_growth_is_a_finding() -> None:
    flat = [900.0, 950.0, 951.0, 950.0, 952.0, 953.0]
    assert not http_fuzz.growth(flat, 100)
    assert http_fuzz.growth([*flat[:-1], 953.0 + http_fuzz.SLACK_MB], 100)
