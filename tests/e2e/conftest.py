# SPDX-License-Identifier: Apache-2.0
"""The servers that several modules share, and the order of modules."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.shapes import make_model
from tests.division import SHARED_SERVERS, group_of
from tests.e2e.server import ADMIN_TOKEN, BOUND_BLOCKS, EVERYTHING, USER, Server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """`vllm-segreuse serve` with every inference route; whoever uses it leaves it as it was."""
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN}
    with Server(make_model("llama"), EVERYTHING, environment) as server:
        yield server


@pytest.fixture(scope="session")
def bound_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `bound_server` keeps its manifest."""
    return tmp_path_factory.mktemp("bound")


@pytest.fixture(scope="session")
def bound_server(bound_folder: Path) -> Iterator[Server]:
    """One with knowledge bases and few blocks, whose names are bound to API keys."""
    config = bound_folder / "config.yaml"
    user, alice, bob = (hashlib.sha256(key.encode()).hexdigest() for key in (USER, "alice", "bob"))
    config.write_text(f"""
policy: shift
min_reused_tokens: 32
frozen_share: 0.5
knowledge_path: {bound_folder / "manifest.sqlite"}
knowledge_chunk_tokens: 256
namespaces:
  {user}: ["*"]
  {alice}: [handbook]
  {bob}: [handbook]
namespaces_trust_programs: true  # a server does not care
""")
    args = [
        *("--max-model-len", "1024", "--max-num-batched-tokens", "1024"),
        *("--num-gpu-blocks-override", str(BOUND_BLOCKS), *EVERYTHING),
        *("--segreuse-config", str(config)),
    ]
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN, "VLLM_SERVER_DEV_MODE": "1"}
    with Server(make_model("qwen3"), args, environment) as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts servers takes longest and comes first, so that processes end together."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Tests without an engine, shared servers, other servers, engines in this process."""
    if not item.path.is_relative_to(Path(__file__).parent):
        return 0
    if group_of(item.path.relative_to(item.config.rootpath).as_posix()) in SHARED_SERVERS:
        return 1
    return 2 if hasattr(item.module, "Server") else 3
