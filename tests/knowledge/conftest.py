# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest

from tests.knowledge.fake_server import TOKEN, FakeServer, fake_server
from vllm_segreuse.knowledge import client as client_module
from vllm_segreuse.knowledge.client import KnowledgeClient


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(client_module, "PAUSES_S", (0.01, 0.01))
    with fake_server() as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[KnowledgeClient]:
    with KnowledgeClient(server.url, TOKEN) as client:
        yield client
