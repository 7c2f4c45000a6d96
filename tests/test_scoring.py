# SPDX-License-Identifier: Apache-2.0
"""Which server holds most of a request's documents, by what real servers say over HTTP; and the
recipes that use it."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from segreuse_tools.knowledge.client import KnowledgeClient
from segreuse_tools.routing import (
    DIGESTS_HEADER,
    HEADER,
    digests_headers,
    document_digests,
    routing_headers,
)
from segreuse_tools.scoring import SESSION_TOKEN_HEADER, Scorer, session_token
from tests.knowledge.served import TOKEN, Served, served
from vllm_segreuse.features.knowledge.schemas import NewDocument

RECIPES = Path(__file__).parents[1] / "configs" / "recipes"
TOKENS = {"travel.md": 30, "faq.md": 20, "rules.md": 60}


@pytest.fixture(scope="module")
def two() -> Iterator[dict[str, Served]]:
    """The first has two documents, the second one that is larger."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(served()) for name in ("one", "two")}
        for name, ids in (("one", ["travel.md", "faq.md"]), ("two", ["rules.md"])):
            with KnowledgeClient(servers[name].url, TOKEN) as client:
                client.create("handbook", context="none")
                new = [NewDocument(id=it, token_ids=[7 + len(it)] * TOKENS[it]) for it in ids]
                client.add("handbook", new, wait=True)
        yield servers


@pytest.fixture
def urls(two: dict[str, Served]) -> dict[str, str]:
    return {name: server.url for name, server in two.items()}


def digests(*ids: str) -> list[str]:
    return document_digests(ids, "handbook")


def test_scores_are_tokens_that_each_server_holds(urls: dict[str, str]) -> None:
    scorer = Scorer(urls, TOKEN)
    assert scorer.scores(digests("travel.md", "faq.md")) == {"one": 50.0, "two": 0.0}
    assert scorer.scores(digests(*TOKENS)) == {"one": 50.0, "two": 60.0}
    assert scorer.best(digests("travel.md", "faq.md")) == "one"
    assert scorer.best(digests(*TOKENS)) == "two"
    assert scorer.scores(digests("faq.md", "faq.md"))["one"] == 20.0, "a document counts once"
    [single] = digests("faq.md")
    assert (scorer.scores(single), scorer.best(single)) == ({"one": 20.0, "two": 0.0}, "one")
    scorer.close()


def test_servers_are_asked_as_clients_of_knowledge_bases_ask_them() -> None:
    """A token need not be ASCII, and a file that holds it ends with a line."""
    sent: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/plugins/segreuse/v1/holdings"
        sent.append(request.headers.get("Authorization"))
        return httpx.Response(200, json={"engines": []})

    transport = httpx.MockTransport(answer)
    scorer = Scorer({"one": "http://one/v1/"}, "geheim-ß\n", transport=transport)
    assert scorer.scores(["x"]) == {"one": 0.0}
    assert sent == ["Bearer geheim-ß"]
    with pytest.raises(ValueError, match=r"the admin token has the control character '\\n'"):
        Scorer({"one": "http://one"}, "gehe\nim", transport=transport)


def test_nobody_holds_documents_of_another_namespace(urls: dict[str, str]) -> None:
    scorer = Scorer(urls, TOKEN)
    assert scorer.best(document_digests(TOKENS, "another")) is None
    assert scorer.best([]) is None


def test_a_server_is_asked_once_in_a_while(two: dict[str, Served], urls: dict[str, str]) -> None:
    now = 100.0
    scorer = Scorer(urls, TOKEN, max_age_s=5, clock=lambda: now)
    asked = len(two["one"].requests)
    for _ in range(3):
        scorer.scores(digests("faq.md"))
    assert len(two["one"].requests) == asked + 1
    now += 5
    scorer.scores(digests("faq.md"))
    assert len(two["one"].requests) == asked + 2
    assert two["one"].requests[-1] == ("GET", "/plugins/segreuse/v1/holdings")


def test_what_has_become_cold_is_not_held(two: dict[str, Served], urls: dict[str, str]) -> None:
    scorer = Scorer(urls, TOKEN, max_age_s=0)
    two["two"].cool()
    assert scorer.scores(digests("rules.md"))["two"] == 0.0
    with KnowledgeClient(two["two"].url, TOKEN) as client:
        client.warm("handbook", wait=True)
    assert scorer.scores(digests("rules.md"))["two"] == 60.0


@pytest.mark.parametrize("failure", ["busy", "gone", "token"])
def test_a_server_that_does_not_answer_holds_nothing(
    failure: str, two: dict[str, Served], urls: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    if failure == "busy":
        two["one"].failures = [503]
    others = {"one": "http://127.0.0.1:9", "two": urls["two"]} if failure == "gone" else urls
    scorer = Scorer(others, "wrong" if failure == "token" else TOKEN, max_age_s=0)
    with caplog.at_level(logging.WARNING):
        found = scorer.scores(digests(*TOKENS))
    assert found == {"one": 0.0, "two": 0.0 if failure == "token" else 60.0}
    assert "one does not say what it holds" in caplog.text


def answering(*engines: dict[str, tuple[int, str]]) -> Any:
    """A transport on which every server holds these, by engine."""
    import httpx

    documents = [
        {digest: {"tokens": tokens, "tier": tier} for digest, (tokens, tier) in held.items()}
        for held in engines
    ]
    body = {"engines": [{"documents": held} for held in documents]}
    return httpx.MockTransport(lambda request: httpx.Response(200, json=body))


def test_servers_are_asked_at_once() -> None:
    """So that several that do not answer cost a router the time of one."""
    all_are_asked = threading.Barrier(3)

    def silent(request: httpx.Request) -> httpx.Response:
        all_are_asked.wait(30)
        raise httpx.ReadTimeout("no answer", request=request)

    servers = {name: f"http://{name}" for name in ("one", "two", "three")}
    scorer = Scorer(servers, TOKEN, transport=httpx.MockTransport(silent))
    assert scorer.scores(["x"]) == dict.fromkeys(servers, 0.0)
    scorer.close()


def test_tokens_are_worth_less_where_they_must_be_copied_from() -> None:
    held = {"a": (100, "gpu"), "b": (100, "host"), "c": (100, "disk")}
    scorer = Scorer({"s": "http://s"}, TOKEN, transport=answering(held))
    gpu, host, disk = (scorer.scores([digest])["s"] for digest in "abc")
    assert 100 == gpu > host > disk > 0
    weights: Any = {"gpu": 1.0, "host": 0.0, "disk": 0.0}
    cautious = Scorer({"s": "http://s"}, TOKEN, weights, transport=answering(held))
    assert cautious.scores([*"abc"]) == {"s": 100.0}


def test_a_server_of_several_engines_counts_by_what_each_holds() -> None:
    one, both = {"a": (100, "gpu")}, {"a": (100, "gpu"), "b": (40, "gpu")}
    scorer = Scorer({"s": "http://s"}, TOKEN, transport=answering(one, both))
    assert scorer.scores(["a"]) == {"s": 100.0}
    assert scorer.scores(["b"]) == {"s": 20.0}


# production-stack.


class SessionRouter:
    """As that of `vllm_router.routers.routing_logic`, as far as ours needs it."""

    def __init__(self, session_key: str) -> None:
        self.session_key = session_key

    async def route_request(
        self, endpoints: Any, engine_stats: Any, request_stats: Any, request: Any, body: Any
    ) -> str:
        return f"by session {request.headers[self.session_key]}"


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    logic: Any = ModuleType("vllm_router.routers.routing_logic")
    logic.SessionRouter = SessionRouter
    routers: Any = ModuleType("vllm_router.routers")
    routers.routing_logic = logic
    for name, module in (
        ("vllm_router", ModuleType("vllm_router")),
        ("vllm_router.routers", routers),
        ("vllm_router.routers.routing_logic", logic),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_SEGREUSE_ADMIN_TOKEN", TOKEN)
    path = RECIPES / "production_stack_router.py"
    spec = importlib.util.spec_from_file_location("production_stack_router", path)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    assert logic.SessionRouter is recipe.DocumentRouter, "what its `session` makes"
    return logic.SessionRouter(HEADER.lower())


def routed(router: Any, urls: list[str], *ids: str) -> str:
    headers = {**digests_headers(ids, "handbook"), **routing_headers(ids, "handbook")}
    if ids:
        headers[HEADER.lower()] = headers[HEADER]  # as Starlette finds it
    request = SimpleNamespace(headers={HEADER.lower(): "none", **headers})
    endpoints = [SimpleNamespace(url=url) for url in urls]
    chosen: str = asyncio.run(router.route_request(endpoints, {}, {}, request, {}))
    return chosen


def test_a_router_of_the_stack_goes_where_documents_are(router: Any, urls: dict[str, str]) -> None:
    both = [*urls.values()]
    assert routed(router, both, "faq.md") == urls["one"]
    assert routed(router, both, "rules.md", "faq.md") == urls["two"]
    assert routed(router, both[:1], "rules.md", "faq.md") == urls["one"], "the other is gone"
    unknown = routing_headers(["new.md"], "handbook")[HEADER]
    assert routed(router, both, "new.md") == f"by session {unknown}"
    assert routed(router, both) == "by session none"


# llm-d.


def test_llm_d_is_told_the_pod(urls: dict[str, str]) -> None:
    scorer = Scorer({f"default/{name}": url for name, url in urls.items()}, TOKEN)
    pod = scorer.best(digests("rules.md"))
    assert pod is not None
    [(name, value)] = session_token(pod).items()
    assert name == SESSION_TOKEN_HEADER
    assert base64.b64decode(value).decode() == "default/two"


def test_the_pickers_plugins_are_all_declared_and_the_pod_weighs_most() -> None:
    config = yaml.safe_load((RECIPES / "llm-d.yaml").read_text())
    [profile] = config["schedulingProfiles"]
    weights = {it["pluginRef"]: it.get("weight") for it in profile["plugins"]}
    assert weights.keys() < {it["type"] for it in config["plugins"]}
    assert weights["session-affinity-scorer"] > weights["queue-scorer"]


def test_the_header_lists_digests_in_order() -> None:
    assert digests_headers([], "handbook") == {}
    [(name, value)] = digests_headers(["b", "a"], "handbook").items()
    assert (name, value.split(",")) == (DIGESTS_HEADER, document_digests(["b", "a"], "handbook"))


@pytest.mark.parametrize("url", ["http://host:80x", "http://[::1", "host:8000", ""])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    """At once, and by name: asked at each request, it would only ever hold nothing."""
    with pytest.raises(ValueError, match=re.escape(repr(url))):
        Scorer({"good": "http://good", "bad": url}, "token")
