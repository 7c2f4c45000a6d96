# SPDX-License-Identifier: Apache-2.0
"""Two engines and two API servers behind one address: each engine reuses what it has computed
itself, and what the other has written to files; the API servers share the flag, the switch and
sessions of administrators."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.shapes import make_model
from tests.e2e import data_parallel
from tests.e2e.data_parallel import ADMIN, DOCUMENTS, ENGINES, ENVIRONMENT, ROUTES, ask
from tests.e2e.server import ADMIN_TOKEN, Server

pytestmark = data_parallel.MARKS

DOCUMENT = DOCUMENTS[0]
RAG = Path(__file__).parents[2] / "configs" / "rag.yaml"
BLOCKS = 160  # of an engine: one long prompt fills most of them
CLOSE = {"Connection": "close"}
"""The next request opens a connection of its own, and meets either of the API servers."""


TIER = """
tier: {{host_gib: 0.1, path: {path}, disk_gib: 0.5, wait_ms: 60000}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("parallel")
    config = folder / "config.yaml"
    config.write_text(RAG.read_text() + TIER.format(path=folder / "tier"))
    flags = ["--segreuse", "--segreuse-config", str(config), "--api-server-count", "2"]
    flags += ["--num-gpu-blocks-override", str(BLOCKS)]
    with Server(make_model("qwen3"), [*data_parallel.FLAGS, *flags], ENVIRONMENT) as running:
        yield running


def test_two_api_servers_share_the_flag_and_the_switch(server: Server) -> None:
    text = "".join(DOCUMENTS)
    for engine in ENGINES:
        assert ask(server, "Both. " + text, engine) is not None, server.log_tail()
    for number in range(6):
        refused = server.post(
            "/v1/completions",
            {"model": "m", "prompt": "a", "extra_keys": number},
            headers=CLOSE,
        )
        assert refused.status_code == 400
        assert ask(server, f"Number {number}. " + text, number % 2)["reused_tokens"] > 0
        state = number % 2 == 0
        verb = "enable" if state else "disable"
        server.post(f"{ROUTES}/{verb}", headers=ADMIN | CLOSE).raise_for_status()
        status = server.get(f"{ROUTES}/status", headers=ADMIN | CLOSE).json()
        assert status["enabled"] is state
        server.post(f"{ROUTES}/enable", headers=ADMIN | CLOSE).raise_for_status()
    shown = server.get("/metrics").text
    for engine in ENGINES:
        assert f'segreuse_tokens_total{{engine="{engine}",kind="reused",model_name="m"}}' in shown
    check_viewer(server)


def check_viewer(server: Server) -> None:
    """Both API servers accept the session that one of them began; each says whose requests it
    shows, and both the metrics of all."""
    with httpx.Client(base_url=f"{server.url}{ROUTES}/ui", headers=CLOSE) as browser:
        assert browser.post("/login", data={"token": ADMIN_TOKEN}).status_code == 303
        processes, reused = set(), set()
        for _ in range(20):
            page = browser.get("/requests").raise_for_status().text
            found = re.search(r"process (\d+); 2 share the port", page)
            assert found is not None
            processes.add(found[1])
            metrics = browser.get("/metrics").raise_for_status().text
            figure = re.search(r"<dt>requests that reused</dt><dd>(\d+)</dd>", metrics)
            assert figure is not None
            reused.add(int(figure[1]))
    assert len(processes) == 2
    assert reused == {6}


def test_an_engine_reuses_what_it_has_computed(server: Server) -> None:
    def reuse(preamble: str, engine: int) -> dict[str, Any]:
        return ask(server, preamble + DOCUMENT, engine, "a namespace of this test")

    reuse("", engine=0)
    assert reuse("One. ", engine=0)["reused_tokens"] > 0
    elsewhere = reuse("Two. ", engine=1)
    assert elsewhere["reused_tokens"] == 0
    assert elsewhere["bypass_reason"] == "too_few_reused_tokens"
    assert reuse("Three. ", engine=1)["reused_tokens"] > 0
    shown = server.get("/metrics").text
    for engine in ENGINES:
        line = f'vllm:segreuse_tokens_total{{engine="{engine}",kind="reused",model_name="m"}}'
        [counted] = [text.split()[-1] for text in shown.splitlines() if text.startswith(line)]
        assert float(counted) > 0


def counted(server: Server, engine: int, event: str) -> float:
    """Records of the files, by what an engine has counted of them."""
    shown = server.get("/metrics").text
    pattern = rf'^vllm:segreuse_tier_files_total{{engine="{engine}",event="{event}".*}} (\S+)$'
    return sum(map(float, re.findall(pattern, shown, re.M)))


def test_an_engine_reuses_what_the_other_has_written_to_files(server: Server) -> None:
    namespace = "a namespace of both engines"
    ask(server, "Six. " + DOCUMENT, 0, namespace)
    filler = {"model": "m", "max_tokens": 1}
    for number in range(100):
        prompt = [300 + number, *range(400, 3400)]  # it is nobody's, and evicts the document
        where = {"X-data-parallel-rank": "0", "Connection": "close"}
        server.post("/v1/completions", filler | {"prompt": prompt}, headers=where)
        ask(server, f"Short {number}.", 1)
        written = counted(server, 0, "stored")
        if number >= 3 and 0 < written <= counted(server, 1, "found"):
            break  # nothing is left of the document in the first engine's GPU memory
    else:
        raise AssertionError(server.log_tail())
    found = ask(server, "Seven. " + DOCUMENT, 1, namespace)
    assert found["tiered_tokens"] == found["reused_tokens"] > 128
    assert counted(server, 1, "shared") > 0


def test_the_kill_switch_reaches_every_engine(server: Server) -> None:
    for engine in ENGINES:
        ask(server, DOCUMENT, engine)
    off = server.post(f"{ROUTES}/disable", headers=ADMIN).raise_for_status().json()
    assert off["enabled"] is False
    for engine in ENGINES:
        assert ask(server, "Four. " + DOCUMENT, engine)["bypass_reason"] == "disabled"
    server.post(f"{ROUTES}/enable", headers=ADMIN).raise_for_status()
    for engine in ENGINES:
        assert ask(server, "Five. " + DOCUMENT, engine)["reused_tokens"] > 0


def test_knowledge_bases_say_what_they_need(server: Server) -> None:
    refused = server.get(f"{ROUTES}/knowledge-bases", headers=ADMIN)
    assert refused.status_code == 503
    assert "start with --api-server-count 1" in refused.text
