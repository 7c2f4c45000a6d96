# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from segreuse_tools.knowledge import client as client_module
from segreuse_tools.knowledge.client import KnowledgeClient

if TYPE_CHECKING:
    from tests.knowledge.served import Served


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Served]":
    # Here, not above: vLLM comes with it, which tests of files and tables do not need.
    from tests.knowledge.served import served

    monkeypatch.setattr(client_module, "PAUSES_S", (0.01, 0.01))
    with served() as server:
        yield server


@pytest.fixture
def client(server: "Served") -> Iterator[KnowledgeClient]:
    from tests.knowledge.served import TOKEN

    with KnowledgeClient(server.url, TOKEN) as client:
        yield client
