# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest

from tests.knowledge.served import TOKEN, Served, served
from vllm_segreuse.knowledge import client as client_module
from vllm_segreuse.knowledge.client import KnowledgeClient


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(client_module, "PAUSES_S", (0.01, 0.01))
    with served() as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[KnowledgeClient]:
    with KnowledgeClient(server.url, TOKEN) as client:
        yield client
