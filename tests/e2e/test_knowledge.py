# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases over HTTP, on a real server (FAILURE_CASES 24 to 26, 32)."""

import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from segreuse_tools.routing import document_digests
from tests.e2e.server import ADMIN_TOKEN, USER, Server
from tests.e2e.server import BOUND_BLOCKS as NUM_BLOCKS

pytestmark = pytest.mark.e2e

COLD = {"warm": 0, "stored": 0, "cold": 2, "warming": 0, "failed": 0}
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
ROOT = "/plugins/segreuse/v1"
BASES = f"{ROOT}/knowledge-bases"
LIMIT = 60

_dice = random.Random(5)


def tokens(count: int) -> list[int]:
    return [_dice.randrange(16, 4000) for _ in range(count)]


class Client:
    """The server, as an administrator and as a user."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def admin(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        url = path if path.startswith("/") else f"{BASES}/{path}"
        answer = self.server.request(method, url, json=body, headers=ADMIN)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def create(self, name: str, **fields: Any) -> None:
        self.admin("POST", BASES, {"name": name, **fields}, 201)

    def add(self, base: str, status: int = 200, **documents: list[int]) -> Any:
        body = {
            "documents": [{"id": i, "token_ids": ids} for i, ids in documents.items()],
            "wait": True,
        }
        return self.admin("POST", f"{base}/documents", body, status)

    def stats(self) -> Any:
        return self.admin("GET", f"{ROOT}/stats")

    def ask(self, prompt: list[int] | str, keys: Any = None, api_key: str = USER) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        if keys is not None:
            body["extra_keys"] = keys
        headers = {"Authorization": f"Bearer {api_key}"}
        answer = self.server.post("/v1/completions", body, headers=headers)
        assert answer.status_code == 200, answer.text
        return (answer.json().get("kv_transfer_params") or {}).get("segreuse") or {}

    def churn(self) -> None:
        """Enough unrelated prompts to evict everything that nobody holds."""
        for _ in range(6):
            self.ask(tokens(900))

    def until(self, base: str, document: str, status: str) -> Any:
        for _ in range(300):
            found = self.admin("GET", f"{base}/documents/{document}")
            if found["status"] == status:
                return found
            time.sleep(0.1)
        raise AssertionError(f"not {status}: {found}")


@pytest.fixture
def client(bound_server: Server) -> Iterator[Client]:
    yield (asking := Client(bound_server))
    for base in asking.admin("GET", BASES)["data"]:
        asking.admin("DELETE", base["name"], status=204)
    blocks = asking.stats()["blocks"]
    assert (blocks["frozen"], blocks["promised"]) == (0, 0)
    assert blocks["free"] == blocks["total"] == NUM_BLOCKS - 1, "blocks leak"


def test_frozen_passages_outlive_what_evicts_others(client: Client) -> None:
    client.create("handbook")
    kept, other = tokens(300), tokens(300)
    (document,) = client.add("handbook", doc=kept)["data"]
    assert (document["status"], document["tokens"], document["blocks"]) == ("warm", 300, 10)
    client.ask(other, keys="handbook")
    client.churn()
    prompt = [*tokens(37), *other, *tokens(11), *kept, *tokens(5)]
    report = client.ask(prompt, keys="handbook")
    assert report["reused_tokens"] == len(kept), "to the last token, and nothing of the other"
    assert client.admin("GET", "handbook/documents/doc")["hits"] == 1
    assert client.ask(prompt, keys="another")["reused_tokens"] == 0


def frozen_share(client: Client) -> float:
    """As Prometheus would read it."""
    lines = client.server.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:segreuse_frozen_share{")]
    return float(line.rpartition(" ")[2])


def test_the_share_that_is_frozen_is_a_metric(client: Client) -> None:
    client.ask(tokens(10))
    assert frozen_share(client) == 0
    client.create("handbook")
    client.add("handbook", doc=tokens(300))
    assert frozen_share(client) == pytest.approx(10 / (NUM_BLOCKS - 1)), "without a further request"
    client.admin("DELETE", "handbook", status=204)
    client.ask(tokens(10))
    assert frozen_share(client) == 0


def test_equal_text_is_stored_once_in_one_namespace_only(client: Client) -> None:
    for name, key in (("one", "shared"), ("two", "shared"), ("three", None)):
        client.create(name, extra_key=key)
    text = tokens(200)
    client.add("one", doc=text)
    before = client.stats()["blocks"]["frozen"]
    (document,) = client.add("two", doc=text)["data"]
    assert document["references"] == 2
    assert client.stats()["blocks"]["frozen"] == before
    client.add("three", doc=text)
    assert client.stats()["blocks"]["promised"] == 2 * before
    client.admin("DELETE", "one", status=204)
    assert client.admin("GET", "two/documents/doc")["status"] == "warm"


def test_adding_again_changes_nothing_and_other_content_replaces(client: Client) -> None:
    client.create("base")
    text = tokens(100)
    for _ in range(2):
        client.add("base", doc=text)
    assert client.stats()["blocks"]["frozen"] == 4
    client.add("base", doc=tokens(40))
    assert client.stats()["blocks"]["frozen"] == 2
    assert client.admin("GET", "base/documents/doc")["tokens"] == 40


def test_24_over_the_share_is_refused_whole(client: Client) -> None:
    client.create("base", context="none")  # or others would need more blocks, too
    assert client.stats()["blocks"]["limit"] == LIMIT
    client.add("base", a=tokens(56 * 32))
    before = client.stats()
    error = client.add("base", 507, b=tokens(32), c=tokens(4 * 32))["error"]
    assert error["type"] == "insufficient_storage"
    assert client.stats() == before
    client.add("base", b=tokens(32), c=tokens(3 * 32))
    assert client.stats()["blocks"]["frozen"] == LIMIT
    assert not client.ask(tokens(1020)), "the longest request fits beside them"


def test_pressure_gives_back_and_a_prompt_brings_it_back(client: Client) -> None:
    client.create("base")
    text = tokens(320)
    client.add("base", doc=text, other=tokens(1200))
    with httpx.Client(base_url=client.server.url, timeout=60) as http:
        body = {"model": "m", "prompt": [tokens(1000) for _ in range(6)], "max_tokens": 8}
        assert http.post("/v1/completions", json=body).status_code == 200
    assert client.stats()["given_back"] > 0
    found = client.admin("GET", "base/documents")["data"]
    assert {d["status"] for d in found} <= {"cold", "warm", "warming"}
    client.ask([*tokens(9), *text, *tokens(9)], keys="base")
    client.until("base", "doc", "warm")


def test_routers_are_told_which_documents_are_held(client: Client) -> None:
    client.create("base")
    client.add("base", doc=tokens(100), other=tokens(50))
    held = {
        digest: {"tokens": count, "tier": "gpu"}
        for digest, count in zip(document_digests(["doc", "other"], "base"), (100, 50), strict=True)
    }
    url = f"{ROOT}/holdings?extra_key=base"
    assert client.admin("GET", url) == {"engines": [{"documents": held}]}
    client.server.post("/reset_prefix_cache")
    assert client.admin("GET", url) == {"engines": [{"documents": {}}]}


def test_26_a_reset_makes_documents_cold_and_one_call_warm(client: Client) -> None:
    client.create("base")
    client.add("base", doc=tokens(100), other=tokens(50))
    client.server.post("/reset_prefix_cache")
    stats = client.stats()
    assert stats["documents"] == COLD
    assert stats["blocks"]["frozen"] == 0
    found = client.admin("POST", "base/warm", {"wait": True})["data"]
    assert [d["status"] for d in found] == ["warm", "warm"]


def away(client: Client, how: list[tuple[str, Any]]) -> None:
    """Two documents of a base, cold after these requests to vLLM, which the tests' server takes."""
    client.create("base")
    client.add("base", doc=tokens(100), other=tokens(50))
    for path, body in how:
        answer = client.server.post(path, body)
        assert answer.status_code == 200, answer.text
    stats = client.stats()
    assert stats["documents"] == COLD
    assert (stats["blocks"]["frozen"], stats["blocks"]["free"]) == (0, stats["blocks"]["total"])


def test_26_asleep_documents_are_cold_and_one_call_warms_them(client: Client) -> None:
    # On CPU vLLM keeps the memory, but the scheduler sleeps and forgets as it does elsewhere.
    away(client, [("/sleep?level=1", None)])
    assert client.server.get("/is_sleeping").json() == {"is_sleeping": True}
    found = client.admin("POST", "base/warm", {}, 202)["data"]
    assert [d["status"] for d in found] == ["warming", "warming"], "whoever sleeps computes nothing"
    assert client.stats()["documents"]["warming"] == 2
    assert client.server.post("/wake_up").status_code == 200
    for document in ("doc", "other"):
        client.until("base", document, "warm")


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", None])
def test_26_new_weights_make_documents_cold_and_one_call_warms_them(
    client: Client, mode: str | None
) -> None:
    """Also if nobody pauses the engine, and so nobody resets its cache."""
    update = ("/collective_rpc", {"method": "reload_weights"})
    paused = [(f"/pause?mode={mode}", None), update, ("/resume", None)]
    away(client, [update] if mode is None else paused)
    found = client.admin("POST", "base/warm", {"wait": True})["data"]
    assert [d["status"] for d in found] == ["warm", "warm"]


def test_25_deleting_twice_is_no_error(client: Client) -> None:
    client.create("base")
    client.add("base", doc=tokens(100))
    for _ in range(2):
        client.admin("DELETE", "base/documents/doc", status=204)
    client.admin("DELETE", "base/documents/never", status=404)
    for _ in range(2):
        client.admin("DELETE", "base", status=204)
    client.admin("DELETE", "never", status=404)
    client.admin("GET", "base", status=404)


def test_25_one_name_one_base(client: Client) -> None:
    body = {"name": "base", "preamble": "Read this.", "metadata": {"owner": "me"}}
    client.admin("POST", BASES, body, 201)
    client.admin("POST", BASES, body, 200)
    assert client.admin("POST", BASES, body | {"preamble": None}, 409)["error"]["type"] == (
        "conflict"
    )


def test_text_is_tokenised_behind_the_preamble(client: Client) -> None:
    client.create("base", preamble="You answer from passages. " * 20)
    text = "Reuse what was computed once. " * 40
    body = {"documents": [{"id": "dir/a b.txt", "text": text}], "wait": True}
    (document,) = client.admin("POST", "base/documents", body)["data"]
    assert document["status"] == "warm"
    assert client.admin("GET", "base/documents/dir/a%20b.txt")["id"] == "dir/a b.txt"
    prompt = "Something else. " * 7 + text + "What is reused?"
    report = client.ask(prompt, keys="base")
    assert report["reused_tokens"] >= document["tokens"] - 4, "but for tokens at the seams"


def test_pages_follow_one_another(client: Client) -> None:
    client.create("base")
    client.add("base", **{f"d{i}": tokens(32) for i in range(5)})
    seen, after = [], ""
    while after is not None:
        page = client.admin("GET", f"base/documents?limit=2&after={after}")
        seen += [d["id"] for d in page["data"]]
        after = page["next"]
    assert seen == [f"d{i}" for i in range(5)]


def test_guessing_a_name_gives_nothing(client: Client) -> None:
    client.create("payroll")
    text = tokens(200)
    client.add("payroll", doc=text)
    prompt = [*tokens(9), *text, *tokens(9)]
    guessed = client.ask(prompt, keys="payroll", api_key="mallory")
    unknown = client.ask([*tokens(9), *text, *tokens(9)], keys="no such name", api_key="mallory")
    assert guessed == unknown
    assert guessed["reused_tokens"] == 0
    assert client.admin("GET", "payroll/documents/doc")["hits"] == 0
    assert client.ask([*tokens(9), *text, *tokens(9)], keys="payroll")["reused_tokens"] == 200


def test_clients_cannot_freeze(client: Client) -> None:
    order = {"segreuse_freeze": "mine:0:1:0", "extra_keys": ["x"]}
    answer = client.server.post(
        "/v1/completions", {"model": "m", "prompt": tokens(64), "vllm_xargs": order}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "segreuse_freeze"
    assert client.stats()["blocks"]["frozen"] == 0


def test_32_without_token_nothing_is_shown(client: Client) -> None:
    for path in (BASES, f"{ROOT}/openapi.json", f"{ROOT}/nothing", f"{ROOT}/stats"):
        assert client.server.get(path).status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert client.server.get(path, headers=wrong).status_code == 403
    paths = client.admin("GET", f"{ROOT}/openapi.json")["paths"]
    assert "/knowledge-bases/{name}/documents" in paths
    assert not any(path.startswith("/v1") for path in paths)


@pytest.mark.slow("the server is started again", instead="e2e/test_knowledge knowledge/test_stored")
def test_a_restart_brings_documents_back_but_not_torn_ones(
    bound_folder: Path, client: Client
) -> None:
    # Last in this file: the server is stopped, and started anew.
    client.create("base")
    text = tokens(100)
    client.add("base", popular=text, torn=tokens(100), quiet=tokens(40))
    client.ask([*tokens(3), *text, *tokens(3)], keys="base")
    assert client.admin("GET", "base/documents/popular")["hits"] == 1
    client.server.interrupt()
    with sqlite3.connect(bound_folder / "manifest.sqlite") as manifest:
        manifest.execute(
            "UPDATE documents SET tokens = x'01000000' || substr(tokens, 5) WHERE id = 'torn'"
        )
    manifest.close()
    client.server.start()
    torn = client.admin("GET", "base/documents/torn")
    assert (torn["status"], torn["blocks"]) == ("failed", 0)
    assert "torn" in torn["error"]
    assert client.until("base", "popular", "warm")["hits"] == 1
    client.until("base", "quiet", "warm")
    client.churn()
    assert client.ask([*tokens(7), *text, *tokens(3)], keys="base")["reused_tokens"] == 100
    client.add("base", torn=tokens(50))
    assert client.admin("GET", "base/documents/torn")["status"] == "warm"


@pytest.mark.patches("renderer")
def test_compressed_documents_are_named(client: Client) -> None:
    """By `vllm_xargs` with a marker in the text, or by token ids; and never by their text."""
    client.create("pressed", context="none")
    text = tokens(96)
    sent = {"documents": [{"id": "a b", "token_ids": text, "keep": 0.5}], "wait": True}
    [added] = client.admin("POST", "pressed/documents", sent)["data"]
    assert (added["status"], added["blocks"]) == ("warm", 2)
    assert (added["keep"], added["scorer"]) == (0.5, "attention")
    client.add("pressed", plain=tokens(40))

    def ask(prompt: Any, *names: str, keys: Any = "pressed", status: int = 200) -> Any:
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        body |= {"extra_keys": keys, "vllm_xargs": {"segreuse_documents": list(names)}}
        headers = {"Authorization": f"Bearer {USER}"}
        answer = client.server.post("/v1/completions", body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    found = ask("Hello [[pressed/a b]] and so on", "pressed/a b")
    assert found["kv_transfer_params"]["segreuse"]["reused_tokens"] == 48
    plain = client.ask("Hello  and so on")
    assert found["usage"]["prompt_tokens"] >= 48 + plain.get("prompt_tokens", 0)
    for prompt, names, keys, status, reason in (
        ("Hello [[pressed/b]]", ["pressed/b"], "pressed", 404, "no document 'pressed/b'"),
        ("Hello [[pressed/a b]]", ["pressed/a b"], "another", 404, "no document"),
        ("Hello [[pressed/plain]]", ["pressed/plain"], "pressed", 400, "not compressed"),
        ("Hello", ["pressed/a b"], "pressed", 400, "does not stand in the prompt"),
        (text, ["pressed/a b"], "pressed", 400, "does not stand in the prompt"),
    ):
        refused = ask(prompt, *names, keys=keys, status=status)
        assert reason in refused["error"]["message"]
    for keep in (0, 1.5, -1, "half", True):
        bad = {"documents": [{"id": "c", "text": "x", "keep": keep}]}
        refused = client.admin("POST", "pressed/documents", bad, 400)
        assert refused["error"]["param"] == "documents.0.keep"
    bad = {"documents": [{"id": "c", "text": "x", "scorer": "uniform"}]}
    assert "no keep" in client.admin("POST", "pressed/documents", bad, 400)["error"]["message"]
    client.admin("DELETE", "pressed/documents/a b", None, 204)
    ask("Hello [[pressed/a b]]", "pressed/a b", status=404)
    client.admin("DELETE", "pressed", None, 204)
