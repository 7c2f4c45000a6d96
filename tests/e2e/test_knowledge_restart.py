# SPDX-License-Identifier: Apache-2.0
"""A server that is started anew with 200 documents: it answers at once, and warms them in order."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.shapes import make_model
from segreuse_tools.knowledge.client import ClientError, KnowledgeClient
from tests.e2e.server import Server
from tests.reports import Whole
from vllm_segreuse.features.knowledge.schemas import Document, NewDocument, Stats
from vllm_segreuse.features.knowledge.warming import AT_ONCE

pytestmark = pytest.mark.e2e

TOKEN = "admin"
DOCUMENTS = 200
DOCUMENT_TOKENS = 400
BLOCKS = 13  # of each
POPULAR = 6
"""Documents that requests have used: the first one POPULAR times, the next once less, ..."""
CONFIG = """
policy: shift
min_reused_tokens: 32
knowledge_path: {path}
"""
ARGS = [
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "6001"),
    *("--max-num-batched-tokens", "512"),  # so that warming takes seconds
]

_dice = random.Random(7)


def tokens(count: int) -> list[int]:
    return [_dice.randrange(300, 8000) for _ in range(count)]


CONTENT = {f"d{number:03}": tokens(DOCUMENT_TOKENS) for number in range(DOCUMENTS)}
USED = dict(zip(_dice.sample(sorted(CONTENT), POPULAR), range(POPULAR, 0, -1), strict=True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("restart")
    (folder / "config.yaml").write_text(CONFIG.format(path=folder / "manifest.sqlite"))
    args = [*ARGS, "--segreuse-config", str(folder / "config.yaml")]
    with Server(make_model("qwen3"), args, {"VLLM_SEGREUSE_ADMIN_TOKEN": TOKEN}) as server:
        yield server


def ask(server: Server, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "extra_keys": "base"}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return Whole(answer.json()["kv_transfer_params"]["segreuse"])


def bring(server: Server, document: str) -> int:
    """Tokens of a document that a prompt reuses."""
    return ask(server, [*tokens(7), *CONTENT[document], *tokens(5)])["reused_tokens"]


def start(server: Server, bases: KnowledgeClient) -> Stats:
    """Start again; the first statistics that are to be had, asked for all the time."""
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        while starting.is_alive():
            try:
                return bases.stats()
            except ClientError:
                time.sleep(0.01)
    finally:
        starting.join()
    return bases.stats()


def check(stats: Stats) -> None:
    """What must hold at any moment."""
    counts, blocks = stats.documents, stats.blocks
    assert counts.warm + counts.warming + counts.cold + counts.failed == DOCUMENTS
    assert (stats.bases, counts.failed, counts.cold) == (1, 0, 0)
    assert blocks.promised == DOCUMENTS * BLOCKS
    assert blocks.frozen == counts.warm * BLOCKS, "each in one part"
    assert blocks.free <= blocks.total - blocks.frozen
    assert stats.hits >= sum(USED.values()), "hits outlive a restart"


def check_order(documents: list[Document]) -> None:
    """Those used most are warm first, but for as many as are computed at a time."""
    warm = {document.id for document in documents if document.status == "warm"}
    unused = [document.id for document in documents if document.id not in USED]
    order = [*USED, *unused]
    latest = max((order.index(id_) for id_ in warm), default=-1)
    missing = [id_ for id_ in order[: latest + 1] if id_ not in warm]
    assert len(missing) < AT_ONCE, f"{order[latest]} is warm before {missing}"


@pytest.mark.slow("200 documents, twice", instead="e2e/test_knowledge knowledge/test_stored")
def test_200_documents_come_back_in_order_and_statistics_tell_the_truth(server: Server) -> None:
    with KnowledgeClient(server.url, TOKEN) as bases:
        bases.create("base")
        new = [NewDocument(id=i, token_ids=content) for i, content in CONTENT.items()]
        added = bases.add("base", new, wait=True)
        assert {document.status for document in added} == {"warm"}
        for id_, hits in USED.items():
            assert [bring(server, id_) for _ in range(hits)] == [DOCUMENT_TOKENS] * hits
        # Asked now: what is used within the last two seconds of a server's life may be forgotten.
        assert bases.stats().hits == sum(USED.values())
        server.interrupt()

        stats = start(server, bases)
        check(stats)
        first_warm = stats.documents.warm
        assert first_warm < DOCUMENTS, "the server waited for its documents"
        # It serves while it warms.
        most_used = next(iter(USED))
        bring(server, most_used)
        seen = [first_warm]
        while stats.documents.warming:
            stats = bases.stats()
            check(stats)
            seen.append(stats.documents.warm)
            listed = list(bases.documents("base"))
            check_order(listed)
            assert len(listed) == DOCUMENTS
            by_base = bases.base("base")
            assert by_base.documents.warm >= seen[-1]
        assert seen == sorted(seen)
        assert stats.documents.warm == DOCUMENTS
        assert any(0 < warm < DOCUMENTS for warm in seen), "nothing was seen of the warming"
        assert bring(server, most_used) == DOCUMENT_TOKENS
