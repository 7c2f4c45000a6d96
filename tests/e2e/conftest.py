# SPDX-License-Identifier: Apache-2.0
"""The server that several modules share, and the order of modules."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.shapes import make_model
from tests.division import SHARED_SERVER, group_of
from tests.e2e.server import ADMIN_TOKEN, EVERYTHING, Server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """`vllm-segreuse serve` with every inference route; whoever uses it leaves it as it was."""
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN}
    with Server(make_model("llama"), EVERYTHING, environment) as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts servers takes longest and comes first, so that processes end together."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Tests without an engine, the shared server, other servers, engines in this process."""
    if not item.path.is_relative_to(Path(__file__).parent):
        return 0
    if group_of(item.path.relative_to(item.config.rootpath).as_posix()) == SHARED_SERVER:
        return 1
    return 2 if hasattr(item.module, "Server") else 3
