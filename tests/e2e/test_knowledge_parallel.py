# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases of two engines behind one API server: requests find a document on either."""

from collections.abc import Iterator
from typing import Any

import pytest

from bench.shapes import make_model
from tests.e2e import data_parallel
from tests.e2e.data_parallel import ADMIN, DOCUMENTS, ENGINES, ENVIRONMENT, ROUTES, ask
from tests.e2e.server import Server

pytestmark = data_parallel.MARKS

DOCUMENT = DOCUMENTS[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = [*data_parallel.FLAGS, "--api-server-count", "1"]
    with Server(make_model("qwen3"), flags, ENVIRONMENT) as running:
        yield running


def admin(server: Server, method: str, path: str = "", body: Any = None) -> Any:
    response = server.request(method, f"{ROUTES}/knowledge-bases{path}", headers=ADMIN, json=body)
    response.raise_for_status()
    return response.json() if response.content else None


def test_a_document_is_warm_on_every_engine(server: Server) -> None:
    admin(server, "POST", body={"name": "base"})
    new = {"documents": [{"id": "doc", "text": DOCUMENT}], "wait": True}
    [document] = admin(server, "POST", "/base/documents", new)["data"]
    assert (document["status"], document["engines"]) == ("warm", [*ENGINES])
    for engine in ENGINES:
        report = ask(server, f"Question {engine}. {DOCUMENT} What does it say?", engine, "base")
        assert report["reused_tokens"] > 0.8 * document["tokens"]
    assert admin(server, "GET", "/base/documents/doc")["hits"] == 2


def test_statistics_are_there_for_each_engine(server: Server) -> None:
    stats = server.get(f"{ROUTES}/stats", headers=ADMIN).json()
    assert len(stats["engines"]) == len(ENGINES)


def test_a_deleted_document_leaves_every_engine(server: Server) -> None:
    admin(server, "DELETE", "/base/documents/doc")
    stats = server.get(f"{ROUTES}/stats", headers=ADMIN).json()
    assert [engine["frozen"] for engine in stats["engines"]] == [0, 0]
