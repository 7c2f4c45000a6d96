# SPDX-License-Identifier: Apache-2.0
"""The server that several modules share, and how modules are divided among processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.shapes import make_model
from tests.e2e.server import ADMIN_TOKEN, EVERYTHING, Server

SHARED = "shared_server"


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """`vllm-segreuse serve` with every inference route; whoever uses it leaves it as it was."""
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN}
    with Server(make_model("llama"), EVERYTHING, environment) as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: a module runs in one process, and so does all that needs the shared
    server. What starts servers takes longest and comes first, so that processes end together."""
    for item in filter(_is_ours, items):
        group = SHARED if SHARED in item.fixturenames else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_turn)


def _is_ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent)


def _turn(item: pytest.Item) -> int:
    """Tests without an engine, the shared server, other servers, engines in this process."""
    if not _is_ours(item):
        return 0
    if SHARED in item.fixturenames:
        return 1
    return 2 if hasattr(item.module, "Server") else 3
