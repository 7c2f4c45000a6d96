# SPDX-License-Identifier: Apache-2.0
"""A server of a model that was trained on anchors: documents of knowledge bases, by their id."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.quality.condensed import AnchorReference
from bench.shapes import passages
from tests.e2e.isolated_models import layout_of, make_isolated
from tests.e2e.server import ADMIN_TOKEN, Server
from tests.reports import Whole

pytestmark = [
    pytest.mark.slow(
        "a server of a model with anchors", instead="e2e/test_anchors e2e/test_knowledge"
    ),
    pytest.mark.patches("renderer"),
]

BASES = "/plugins/segreuse/v1/knowledge-bases"
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
LINK_TOKENS, ANCHORS = 1, (16, 4)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "What does the text say?"
KEY = "handbook"
TEXTS = {f"{number}.txt": text[:150] for number, (_, text) in enumerate(passages()[:6])}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "24"]
    flags += ["--num-gpu-blocks-override", "60"]
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN}
    with Server(make_isolated(LINK_TOKENS, anchors=ANCHORS), flags, environment) as running:
        base = {"name": "kb", "extra_key": KEY}
        running.post(BASES, base, headers=ADMIN).raise_for_status()
        documents = [{"id": name, "text": text} for name, text in TEXTS.items()]
        body = {"documents": documents, "wait": True}
        added = running.post(f"{BASES}/kb/documents", body, headers=ADMIN)
        assert {document["status"] for document in added.json()["data"]} == {"warm"}, added.text
        yield running


@pytest.fixture(scope="module")
def reference() -> AnchorReference:
    return AnchorReference(make_isolated(LINK_TOKENS, anchors=ANCHORS))


def body(*documents: Any, **changes: Any) -> dict[str, Any]:
    sent = {"model": "m", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
    sent |= {"documents": list(documents), "extra_keys": KEY, "temperature": 0.0}
    return sent | {"logprobs": True, "return_token_ids": True} | changes


def named(name: str) -> dict[str, str]:
    return {"base": "kb", "id": name}


def check(reference: AnchorReference, response: httpx.Response, *names: str) -> None:
    """The answer's log-probabilities are those of plain torch, which reads the texts."""
    from transformers import AutoTokenizer

    assert response.status_code == 200, response.text
    folder = make_isolated(LINK_TOKENS, anchors=ANCHORS)
    answer, layout = response.json(), layout_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.encode(TEXTS[name], add_special_tokens=False) for name in names]
    prompt, [choice] = answer["prompt_token_ids"], answer["choices"]
    first, last = (layout.spans(prompt)[which] for which in (0, -1))
    question = prompt[last.stop + LINK_TOKENS :]
    wanted = reference.of_documents(prompt[: first.start], texts, question, choice["token_ids"])
    found = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 0.002
    report = Whole(answer["kv_transfer_params"]["segreuse"])
    assert report["policy"] == "link"
    assert report["exact_tokens"] == report["reused_tokens"] > 0


def test_documents_are_read_by_their_id_in_any_order(
    server: Server, reference: AnchorReference
) -> None:
    for names in (("0.txt", "1.txt", "2.txt"), ("2.txt", "0.txt"), ("5.txt",)):
        response = server.post(CHAT, body(*map(named, names)))
        check(reference, response, *names)


def test_eight_clients_at_a_time(server: Server, reference: AnchorReference) -> None:
    asked = [[f"{(first + step) % 6}.txt" for step in (0, 2, 3)] for first in range(8)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda it: server.post(CHAT, body(*map(named, it))), asked))
    for names, response in zip(asked, answers, strict=True):
        check(reference, response, *names)


@pytest.mark.parametrize(
    ("documents", "changes", "status", "reason"),
    [
        ([{"text": "a text"}], {}, 400, "compressed documents only"),
        ([{"base": "kb", "id": "0.txt", "text": "a"}], {}, 400, "compressed documents only"),
        ([named("9.txt")], {}, 404, "no document 'kb/9.txt'"),
        ([named("0.txt")], {"extra_keys": "other"}, 404, "in the namespace of this"),
        ([named("0.txt")] * 5, {}, 400, "trained for at most 4"),
        ([named("0.txt")], {"cache_salt": "salt"}, 400, "no adapter and no cache_salt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_documents_are_refused(
    server: Server, documents: list[Any], changes: dict[str, Any], status: int, reason: str
) -> None:
    response = server.post(CHAT, body(*documents, **changes))
    assert (response.status_code, reason in response.text) == (status, True), response.text


def test_a_document_needs_a_namespace(server: Server) -> None:
    sent = body(named("0.txt"))
    del sent["extra_keys"]
    response = server.post(CHAT, sent)
    assert response.status_code == 400
    assert "found by extra_keys" in response.text


def test_a_prompt_with_markers_is_another_way(server: Server, reference: AnchorReference) -> None:
    layout_texts = "<|kv_start|>[[kb/3.txt]]<|kv_end|><|link_1_1|>"
    sent = {"model": "m", "prompt": f"Read this: {layout_texts} {QUESTION}", "max_tokens": 8}
    sent |= {"temperature": 0.0, "return_token_ids": True, "logprobs": 0}
    sent["vllm_xargs"] = {"extra_keys": [KEY], "segreuse_documents": ["kb/3.txt"]}
    response = server.post(COMPLETIONS, sent)
    assert response.status_code == 200, response.text
    report = Whole(response.json()["kv_transfer_params"]["segreuse"])
    assert report["exact_tokens"] > 0
