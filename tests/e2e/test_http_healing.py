# SPDX-License-Identifier: Apache-2.0
"""A server that nobody asks anything heals by itself, also behind a pause."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.shapes import make_model
from tests.e2e.engine import Prompts
from tests.e2e.server import Server

pytestmark = [
    pytest.mark.slow(
        "an engine that sleeps in a process of its own",
        instead="e2e/test_healing e2e/test_requests",
    ),
    pytest.mark.patches("engine_core"),
]

AFTER_S = 2.0
HEALING = f"heal_tokens: 96\nheal_after_s: {AFTER_S}\nmin_reused_tokens: 32\n"
SHIFT = {"segreuse_policy": "shift"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("healing") / "config.yaml"
    config.write_text(HEALING)
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # for /pause
    with Server(make_model("llama"), ["--segreuse-config", str(config)], env) as running:
        yield running


def healed(server: Server) -> float:
    """Turns that were computed in full, so far. The API server knows: no engine is asked."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    samples = [it for family in families for it in family.samples]
    wanted = "vllm:segreuse_healings_total"
    return sum(it.value for it in samples if it.name == wanted and it.labels["outcome"] == "healed")


def heals(server: Server, before: float) -> bool:
    """Whether one more turn is computed in full within a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if healed(server) > before:
            return True
        time.sleep(0.1)
    return False


def turn(server: Server, seed: int) -> None:
    """A turn that moves text."""
    text = Prompts(1000, seed=seed)
    document = text.tokens(300)
    for prompt in (document, text.around(document)):
        body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        body |= {"extra_keys": ["docs"], "vllm_xargs": SHIFT}
        answer: Any = server.post("/v1/completions", body).raise_for_status().json()
    assert answer["kv_transfer_params"]["segreuse"]["reused_tokens"] > 200


def test_a_server_that_rests_heals(server: Server) -> None:
    turn(server, 1)
    assert heals(server, 0)


def test_a_pause_without_a_step_is_over_with_it(server: Server) -> None:
    before = healed(server)
    turn(server, 2)
    server.post("/pause?mode=keep&clear_cache=false").raise_for_status()
    time.sleep(AFTER_S + 1)
    assert healed(server) == before
    server.post("/resume").raise_for_status()
    assert heals(server, before)
