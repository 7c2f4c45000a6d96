# SPDX-License-Identifier: Apache-2.0
"""A server that is started again has its documents in files: it says so, and computes nothing of
them."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.shapes import make_model
from bench.suites.tier import prompt_tokens
from segreuse_tools.commands import kb
from segreuse_tools.knowledge import TOKEN_ENV, URL_ENV
from segreuse_tools.knowledge.client import KnowledgeClient
from tests.e2e.server import ADMIN_TOKEN, Server
from tests.reports import Whole
from vllm_segreuse.features.knowledge.schemas import Document, NewDocument

pytestmark = pytest.mark.slow(
    "a server is started again", instead="e2e/test_tier tier/test_restart"
)

CONFIG = """
policy: shift
min_reused_tokens: 32
knowledge_path: {folder}/manifest.sqlite
tier: {{host_gib: 0.05, path: {folder}/tier, disk_gib: 0.2, wait_ms: 60000, min_run_tokens: 32}}
"""
TOKENS = {"first": [*range(300, 620)], "second": [*range(1000, 1320)]}  # whole blocks
DOCUMENT_BLOCKS = 20
RECORDS = r'^vllm:segreuse_tier_records\{.*tier="(\w+)".*\} (\S+)$'


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("restart")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    args = ["--max-model-len", "1024", "--segreuse-config", str(folder / "config.yaml")]
    with Server(make_model("qwen3"), args, {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN}) as server:
        yield server


def ask(server: Server) -> dict[str, Any]:
    """The report on a question over both documents, in another order."""
    prompt = [7, 8, *TOKENS["second"], 9, *TOKENS["first"], 10, 11, 12]
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "extra_keys": "base"}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = Whole(answer.json()["kv_transfer_params"]["segreuse"])
    return report


def wait_for_files(server: Server) -> None:
    """Until what is in host memory is on disk, too: who stops earlier loses the rest."""
    records: dict[str, float] = {}
    for _ in range(200):
        server.post("/v1/completions", {"model": "m", "prompt": [5] * 40, "max_tokens": 1})
        found = re.findall(RECORDS, server.get("/metrics").text, re.M)
        records = {tier: float(count) for tier, count in found}
        if records.get("disk", 0) >= records.get("host", 0) >= DOCUMENT_BLOCKS:
            return
        time.sleep(0.05)
    raise AssertionError(records)


def listed(bases: KnowledgeClient) -> dict[str, Document]:
    return {document.id: document for document in bases.documents("base")}


def test_the_first_answer_after_a_restart_computes_nothing_of_the_documents(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with KnowledgeClient(server.url, ADMIN_TOKEN) as bases:
        bases.create("base")
        new = [NewDocument(id=name, token_ids=tokens) for name, tokens in TOKENS.items()]
        bases.add("base", new, wait=True)
        before = ask(server)
        assert before["reused_tokens"] == sum(map(len, TOKENS.values()))
        assert before["tiered_tokens"] == 0
        wait_for_files(server)
        server.interrupt()
        server.start()
        for state in bases.watch("base"):
            if not state.documents.warming:
                break
        places = {name: (found.status, found.tier) for name, found in listed(bases).items()}
    assert places == dict.fromkeys(TOKENS, ("stored", "disk"))
    monkeypatch.setenv(URL_ENV, server.url)
    monkeypatch.setenv(TOKEN_ENV, ADMIN_TOKEN)
    capsys.readouterr()
    assert kb.main(["ls", "base", "--json"]) == 0
    assert {row["tier"] for row in json.loads(capsys.readouterr().out)} == {"disk"}
    assert kb.main(["ls", "base"]) == 0
    assert "stored (disk)" in capsys.readouterr().out
    assert prompt_tokens(server.get("/metrics").text) == 0, "the start has computed something"
    after = ask(server)
    assert after["tiered_tokens"] == after["reused_tokens"] == before["reused_tokens"]
    assert after["recomputed_tokens"] == before["recomputed_tokens"]
