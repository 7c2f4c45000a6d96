# SPDX-License-Identifier: Apache-2.0
"""Two engines behind one address: each reuses what it has computed itself."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from bench.shapes import make_model, passages
from tests.e2e.server import ADMIN_TOKEN, Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each engine"),
]

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
ROUTES = "/plugins/segreuse/v1"
DOCUMENT = next(text[:2500] for _, text in passages() if len(text) > 2500)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(make_model("qwen3"), ["--data-parallel-size", "2"], environment) as running:
        yield running


def ask(server: Server, prompt: str, engine: int) -> Any:
    """The report on a prompt that this engine answers."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "extra_keys": "docs"}
    where = {"X-data-parallel-rank": str(engine), "Connection": "close"}
    answer = server.post("/v1/completions", body, headers=where).raise_for_status().json()
    return answer["kv_transfer_params"]["segreuse"]


def test_an_engine_reuses_what_it_has_computed(server: Server) -> None:
    ask(server, DOCUMENT, engine=0)
    assert ask(server, "One. " + DOCUMENT, engine=0)["reused_tokens"] > 0
    elsewhere = ask(server, "Two. " + DOCUMENT, engine=1)
    assert elsewhere["reused_tokens"] == 0
    assert elsewhere["bypass_reason"] == "too_few_reused_tokens"
    assert ask(server, "Three. " + DOCUMENT, engine=1)["reused_tokens"] > 0
    shown = server.get("/metrics").text
    for engine in (0, 1):
        line = f'vllm:segreuse_tokens_total{{engine="{engine}",kind="reused",model_name="m"}}'
        [counted] = [text.split()[-1] for text in shown.splitlines() if text.startswith(line)]
        assert float(counted) > 0


def test_the_kill_switch_reaches_every_engine(server: Server) -> None:
    for engine in (0, 1):
        ask(server, DOCUMENT, engine)
    off = server.post(f"{ROUTES}/disable", headers=ADMIN).raise_for_status().json()
    assert off["enabled"] is False
    for engine in (0, 1):
        assert ask(server, "Four. " + DOCUMENT, engine)["bypass_reason"] == "disabled"
    server.post(f"{ROUTES}/enable", headers=ADMIN).raise_for_status()
    for engine in (0, 1):
        assert ask(server, "Five. " + DOCUMENT, engine)["reused_tokens"] > 0


def test_knowledge_bases_say_what_they_need(server: Server) -> None:
    refused = server.get(f"{ROUTES}/knowledge-bases", headers=ADMIN)
    assert refused.status_code == 503
    assert "start with --api-server-count 1" in refused.text
