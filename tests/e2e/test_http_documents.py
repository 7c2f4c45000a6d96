# SPDX-License-Identifier: Apache-2.0
"""A server of a model that was trained on documents computed alone, asked by chat completions."""

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.shapes import passages
from tests.e2e.isolated_models import MAX_DOCUMENTS, Reference, make_isolated
from tests.e2e.server import ADMIN_TOKEN, Server
from tests.reports import Whole

pytestmark = pytest.mark.slow(
    "a server of its own", instead="e2e/test_isolated_documents serve/test_documents"
)

LINK_TOKENS = 1
MAX_LEN = 1024
BLOCKS = 120
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What does the text say?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--dtype", "float32", "--max-model-len", str(MAX_LEN), "--max-num-seqs", "24"]
    flags += ["--num-gpu-blocks-override", str(BLOCKS)]
    environment = {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN}
    with Server(make_isolated(LINK_TOKENS), flags, environment) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(make_isolated(LINK_TOKENS), "float32")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text[:150] for _, text in passages() if len(text) > 400][:8]


def body(*documents: Any, **changes: Any) -> dict[str, Any]:
    sent = {"model": "m", "messages": QUESTION, "documents": list(documents), "max_tokens": 8}
    return sent | {"temperature": 0.0, "logprobs": True, "return_token_ids": True} | changes


def checked(reference: Reference, response: httpx.Response) -> dict[str, Any]:
    """The answer's report, once its log-probabilities are those of plain torch."""
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    found = [token["logprob"] for token in choice["logprobs"]["content"]]
    wanted = reference.logprobs(answer["prompt_token_ids"], choice["token_ids"])
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    assert worst <= 0.002, f"log-probabilities differ by {worst}"
    report: dict[str, Any] = Whole(answer["kv_transfer_params"]["segreuse"])
    assert report["policy"] == "link"
    assert report["exact_tokens"] == report["reused_tokens"]
    return report


def prompt_tokens(server: Server) -> float:
    """What the engine has been given so far."""
    found = re.search(r"^vllm:prompt_tokens_total\{.*\} (\S+)$", server.get("/metrics").text, re.M)
    return 0.0 if found is None else float(found[1])


def test_answers_are_exact_cold_and_warm(
    server: Server, reference: Reference, texts: list[str]
) -> None:
    for order in ((0, 1, 2), (2, 0, 1)):
        documents = [{"text": texts[number]} for number in order]
        response = server.post(CHAT, body(*documents, extra_keys="mine"))
        assert checked(reference, response)["reused_tokens"] > 30


def test_eight_clients_with_overlapping_documents(
    server: Server, reference: Reference, texts: list[str]
) -> None:
    chosen = random.Random(3)

    def client(number: int) -> list[httpx.Response]:
        order = [chosen.sample(range(len(texts)), k=3) for _ in range(3)]
        bodies = [body(*({"text": texts[i]} for i in one), extra_keys="eight") for one in order]
        return [server.post(CHAT, one) for one in bodies]

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(client, range(8)))
    for response in (one for each in answers for one in each):
        checked(reference, response)


def test_requests_without_keys_share_with_nobody_and_never_run_out_of_namespaces(
    server: Server, reference: Reference, texts: list[str]
) -> None:
    same = [body({"text": texts[0]}, max_tokens=1)] * 70
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda one: server.post(CHAT, one), same))
    assert {response.status_code for response in answers} == {200}
    checked(reference, answers[0])
    checked(reference, answers[-1])


LONG = "a long text " * MAX_LEN
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no list": (CHAT, {"documents": "a text"}, "must be a list"),
    "no text": (CHAT, {"documents": [{"title": "a"}]}, "documents[0] has no text"),
    "no mapping": (CHAT, {"documents": ["a", {"text": "b"}]}, "documents[0] has no text"),
    "too many": (CHAT, {"documents": [{"text": "a"}] * (MAX_DOCUMENTS + 1)}, "at most 4"),
    "end token": (CHAT, {"documents": [{"text": "a<|kv_end|>b"}]}, "'<|kv_end|>'"),
    "link token": (CHAT, {"documents": [{"text": "<|link_2_1|>"}]}, "'<|link_2_1|>'"),
    "namespaces": (CHAT, {"documents": [{"text": "a", "extra_keys": "b"}]}, "its namespace"),
    "two namespaces": (CHAT, {"extra_keys": "a", "vllm_xargs": {"extra_keys": "b"}}, "twice"),
    "too long": (CHAT, {"documents": [{"text": LONG}]}, "maximum context length"),
    "prompt logprobs": (CHAT, {"prompt_logprobs": 1, "stream": False}, "prompt_logprobs"),
    "no template": (COMPLETIONS, {"prompt": "a"}, "the prompt has 0"),
    "layout": (COMPLETIONS, {"prompt": "a <|kv_end|> b", "documents": None}, "an end token"),
    "layout in a message": (
        *(CHAT, {"messages": [{"role": "user", "content": "a<|kv_start|>"}]}),
        "has no end token",
    ),
    "one of two prompts": (
        *(COMPLETIONS, {"prompt": ["a", "<|link_1_1|>"], "documents": None}),
        "a link token",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_400_and_nothing_is_computed(
    server: Server, texts: list[str], fault: str, stream: bool
) -> None:
    path, changes, reason = BAD[fault]
    sent = {"stream": stream} | body({"text": texts[0]}, extra_keys="bad") | changes
    if path == COMPLETIONS:
        del sent["messages"]
        sent["logprobs"] = None
    before = prompt_tokens(server)
    response = server.post(path, {key: value for key, value in sent.items() if value is not None})
    assert response.status_code == 400, response.text
    assert reason in response.json()["error"]["message"]
    assert prompt_tokens(server) == before
