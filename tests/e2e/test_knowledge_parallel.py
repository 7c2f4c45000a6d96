# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases of two engines behind one API server: requests find a document on either."""

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
BASES = "/plugins/segreuse/v1/knowledge-bases"
DOCUMENT = next(text[:2500] for _, text in passages() if len(text) > 2500)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    flags = ["--data-parallel-size", "2", "--api-server-count", "1"]
    with Server(make_model("qwen3"), flags, environment) as running:
        yield running


def admin(server: Server, method: str, path: str = "", body: Any = None) -> Any:
    response = server.request(method, BASES + path, headers=ADMIN, json=body)
    response.raise_for_status()
    return response.json() if response.content else None


def ask(server: Server, prompt: str, engine: int) -> Any:
    """The report on a prompt that this engine answers."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "extra_keys": "base"}
    where = {"X-data-parallel-rank": str(engine), "Connection": "close"}
    answer = server.post("/v1/completions", body, headers=where).raise_for_status().json()
    return answer["kv_transfer_params"]["segreuse"]


def test_a_document_is_warm_on_every_engine(server: Server) -> None:
    admin(server, "POST", body={"name": "base"})
    new = {"documents": [{"id": "doc", "text": DOCUMENT}], "wait": True}
    [document] = admin(server, "POST", "/base/documents", new)["data"]
    assert (document["status"], document["engines"]) == ("warm", [0, 1])
    for engine in (0, 1):
        report = ask(server, f"Question {engine}. {DOCUMENT} What does it say?", engine)
        assert report["reused_tokens"] > 0.8 * document["tokens"]
    assert admin(server, "GET", "/base/documents/doc")["hits"] == 2


def test_statistics_are_there_for_each_engine(server: Server) -> None:
    stats = server.get("/plugins/segreuse/v1/stats", headers=ADMIN).json()
    assert len(stats["engines"]) == 2


def test_a_deleted_document_leaves_every_engine(server: Server) -> None:
    admin(server, "DELETE", "/base/documents/doc")
    stats = server.get("/plugins/segreuse/v1/stats", headers=ADMIN).json()
    assert [engine["frozen"] for engine in stats["engines"]] == [0, 0]
