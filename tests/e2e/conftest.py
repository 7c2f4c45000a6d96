# SPDX-License-Identifier: Apache-2.0
"""The server that several modules share."""

from collections.abc import Iterator

import pytest

from bench.shapes import make_model
from tests.e2e.server import ADMIN_TOKEN, EVERYTHING, Server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """`vllm-segreuse serve` with every inference route; whoever uses it leaves it as it was."""
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN}
    with Server(make_model("llama"), EVERYTHING, environment) as server:
        yield server
