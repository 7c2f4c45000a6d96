# SPDX-License-Identifier: Apache-2.0
"""The client against the contract over real HTTP; its own part is batching, paging and errors."""

import contextlib
import subprocess
import sys
from http.client import HTTPConnection

import httpx
import pytest

from segreuse_tools.knowledge import client as module
from segreuse_tools.knowledge.client import (
    ClientError,
    KnowledgeClient,
    RejectedError,
    UnreachableError,
    batches,
)
from tests.knowledge.served import FAULT, TOKEN, Served, served
from vllm_segreuse.features.knowledge.schemas import (
    PREFIX,
    AddDocuments,
    DocumentCounts,
    NewDocument,
)

ODD_IDS = ["a/b.md", "50%", "ü ß?x=1&y#7", "a%2Fb", "+", "a;b"]


def new(*ids: str, text: str = "") -> list[NewDocument]:
    return [NewDocument(id=id, text=text or f"words of {id}") for id in ids]


def test_the_life_of_a_base(client: KnowledgeClient) -> None:
    base = client.create("py", extra_key="k", preamble="Read:", metadata={"v": [1, None]})
    assert (base.name, base.extra_key, base.metadata) == ("py", "k", {"v": [1, None]})
    assert client.create("py", extra_key="k", preamble="Read:", metadata={"v": [1, None]}) == base
    [a, b] = client.add("py", new("a", "b"), wait=True)
    assert (a.status, a.tokens, b.id) == ("warm", 10, "b")
    assert [document.id for document in client.documents("py")] == ["a", "b"]
    assert client.base("py").documents.warm == 2
    assert client.stats().bases == 1
    assert base.context == "siblings"
    assert client.create("alone", context="none").context == "none"
    client.delete("alone")
    client.remove("py", "a")
    assert [document.id for document in client.documents("py")] == ["b"]
    client.delete("py")
    assert list(client.bases()) == []


def test_token_ids_and_metadata_arrive(client: KnowledgeClient) -> None:
    client.create("py")
    [added] = client.add("py", [NewDocument(id="t", token_ids=[5, 6], metadata={"page": 2})])
    assert (added.tokens, added.metadata) == (2, {"page": 2})


@pytest.mark.parametrize("id", ODD_IDS)
def test_ids_are_one_segment_of_the_path(client: KnowledgeClient, server: Served, id: str) -> None:
    client.create("py")
    client.add("py", new("other", id))
    assert client.document("py", id).id == id
    assert server.requests[-1][1].rpartition("/documents/")[2].count("/") == 0
    assert client.text("py", id).text == f"words of {id}"
    client.remove("py", id)
    assert [document.id for document in client.documents("py")] == ["other"]


@pytest.mark.parametrize("id", ["", "..", "a/../b", "nul\0", "x" * 513])
def test_ids_that_urls_would_change_are_not_sent(
    client: KnowledgeClient, server: Served, id: str
) -> None:
    with pytest.raises(ValueError, match="must"):
        client.remove("py", id)
    with pytest.raises(ValueError, match="must"):
        client.base(id)
    assert server.requests == []


def test_lists_come_in_pages(
    client: KnowledgeClient, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 3)
    client.create("py")
    ids = [f"{n:02}" for n in range(10)]
    client.add("py", new(*ids))
    before = len(server.requests)
    assert [document.id for document in client.documents("py")] == ids
    assert len(server.requests) - before == 4
    for name in ("a", "b", "c"):
        client.create(name)
    assert [base.name for base in client.bases()] == ["a", "b", "c", "py"]


def test_batches_hold_everything_once_and_keep_their_limits() -> None:
    sizes = [module.BATCH_CHARS // 2, module.BATCH_CHARS // 2, 1, 3 * module.BATCH_CHARS, 1]
    sizes += [1] * 250
    documents = [NewDocument(id=str(n), text="x" * size) for n, size in enumerate(sizes)]
    cut = list(batches(iter(documents)))
    assert [document for batch in cut for document in batch] == documents
    assert [len(batch) for batch in cut] == [2, 1, 1, 100, 100, 51]
    tokens = NewDocument(id="t", token_ids=[1] * (module.BATCH_CHARS // 4))
    assert [len(batch) for batch in batches([tokens, tokens])] == [1, 1]


def test_many_documents_are_sent_in_batches(client: KnowledgeClient, server: Served) -> None:
    client.create("py")
    added = client.add("py", new(*(str(n) for n in range(205))))
    assert [document.id for document in added] == [str(n) for n in range(205)]
    assert [method for method, _ in server.requests] == ["POST"] * 4


def test_warm_takes_some_or_all(client: KnowledgeClient, server: Served) -> None:
    client.create("py")
    client.add("py", new("a", "b"), wait=True)
    server.cool()
    assert [d.id for d in client.warm("py", ["b"], wait=True)] == ["b"]
    assert [d.status for d in client.documents("py")] == ["cold", "warm"]
    assert {d.status for d in client.warm("py", wait=True)} == {"warm"}
    assert client.warm("py", []) == []


def test_watch_shows_every_state_on_the_way() -> None:
    states = [
        {"name": "py", "extra_key": "py", "preamble": None, "context": "none",
         "metadata": {}, "created_at": 0,
         "documents": {"warming": n, "warm": 2 - n}, "tokens": 0, "blocks": 0, "hits": 0}
        for n in (2, 1, 0, 9)
    ]  # fmt: skip
    transport, seen = _transport(*(httpx.Response(200, json=state) for state in states))
    client = KnowledgeClient("http://x", TOKEN, transport=transport)
    assert [base.documents.warming for base in client.watch("py", interval_s=0)] == [2, 1, 0]
    assert len(seen) == 3


def test_watch_ends_when_nothing_is_warming(client: KnowledgeClient) -> None:
    client.create("py")
    client.add("py", [*new("a", "b"), *new("c", text=FAULT)])
    *_, last = client.watch("py", interval_s=0)
    assert last.documents == DocumentCounts(warm=2, failed=1)
    assert "a faulty document" in (client.document("py", "c").error or "")


def test_refusals_carry_the_servers_words(client: KnowledgeClient, server: Served) -> None:
    with pytest.raises(RejectedError, match="no knowledge base") as missing:
        client.base("py")
    assert (missing.value.status, missing.value.type) == (404, "not_found")
    client.create("py")
    with pytest.raises(RejectedError) as different:
        client.create("py", extra_key="other")
    assert different.value.status == 409


def test_more_than_there_is_room_for_is_refused() -> None:
    with served(limit_blocks=8) as server, KnowledgeClient(server.url, TOKEN) as client:
        client.create("py")
        with pytest.raises(RejectedError, match="blocks") as full:
            client.add("py", new("a", "b", text="long text " * 10))
        assert (full.value.status, full.value.type) == (507, "insufficient_storage")
        assert list(client.documents("py")) == []


@pytest.mark.parametrize("around", [" ", "\n", "\r\n"])
def test_white_space_around_the_token_does_not_count(server: Served, around: str) -> None:
    with KnowledgeClient(server.url, around + TOKEN + around) as client:
        assert client.stats().bases == 0


@pytest.mark.parametrize(
    ("token", "complaint"),
    [
        ("", "is empty: pass the server's, or set VLLM_SEGREUSE_ADMIN_TOKEN to it"),
        (" \n", "is empty"),
        ("sec\nret", r"has the control character '\\n'"),
        ("sec\0ret", r"has the control character '\\x00'"),
        ("sec\x7fret", r"has the control character '\\x7f'"),
    ],
)
def test_a_token_that_no_header_carries_is_refused_at_once(token: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"the admin token {complaint}") as refused:
        KnowledgeClient("http://x", token)
    assert "sec" not in str(refused.value)


@pytest.mark.parametrize("token", ["se cret", "se\tcret", "geheim-ß"])
def test_other_tokens_reach_the_server(server: Served, token: str) -> None:
    with KnowledgeClient(server.url, token) as client, pytest.raises(RejectedError) as refused:
        client.stats()
    assert refused.value.status == 403


def test_a_wrong_token_is_refused(server: Served) -> None:
    with KnowledgeClient(server.url, "wrong") as client, pytest.raises(RejectedError) as refused:
        client.stats()
    assert refused.value.status == 403


@pytest.mark.parametrize(("token", "status"), [(TOKEN, 413), ("wrong", 403)])
def test_a_body_that_is_refused_is_answered(server: Served, token: str, status: int) -> None:
    """More than sockets hold by themselves, from a client that sends all of it before it reads, and
    wants the connection closed then, as urllib does."""
    server.app.state.admin.state.max_body_bytes = 10**6
    body = AddDocuments(documents=new("a", text="x" * 30_000_000)).model_dump_json()
    port = httpx.URL(server.url).port
    headers = {"Authorization": f"Bearer {token}", "Connection": "close"}
    with contextlib.closing(HTTPConnection("127.0.0.1", port)) as connection:
        path = f"{PREFIX}/knowledge-bases/py/documents"
        connection.request("POST", path, body, headers)
        assert connection.getresponse().status == status


def test_a_server_without_the_routes_is_recognised(server: Served) -> None:
    with (
        KnowledgeClient(f"{server.url}/elsewhere", TOKEN) as client,
        pytest.raises(RejectedError, match=r"has no knowledge bases: is it vllm-segreuse"),
    ):
        client.stats()


def test_the_address_of_the_openai_api_does_too(server: Served) -> None:
    with KnowledgeClient(f"{server.url}/v1/", TOKEN) as client:
        assert client.stats().bases == 0


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://[::1"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        KnowledgeClient(url, TOKEN)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_asked_again(client: KnowledgeClient, server: Served, status: int) -> None:
    server.failures = [status, status]
    assert client.create("py").name == "py"
    assert len(server.requests) == 3
    server.failures = [status] * 3
    with pytest.raises(RejectedError, match=f"answered {status}"):
        client.base("py")


@pytest.mark.parametrize("status", [400, 409, 500, 507])
def test_other_errors_are_final(client: KnowledgeClient, server: Served, status: int) -> None:
    server.failures = [status]
    with pytest.raises(RejectedError):
        client.create("py")
    assert len(server.requests) == 1


def _transport(*outcomes: Exception | httpx.Response) -> tuple[httpx.MockTransport, list[str]]:
    left, seen = list(outcomes), []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.method)
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return httpx.MockTransport(answer), seen


def test_a_lost_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0))
    lost = [httpx.ConnectError("refused"), httpx.RemoteProtocolError("dropped")]
    transport, seen = _transport(*lost, httpx.Response(204))
    KnowledgeClient("http://x", TOKEN, transport=transport).delete("py")
    assert seen == ["DELETE"] * 3
    transport, seen = _transport(*lost, httpx.ConnectError("refused"))
    with pytest.raises(UnreachableError, match="http://x cannot be reached: refused"):
        KnowledgeClient("http://x", TOKEN, transport=transport).delete("py")


def test_what_cannot_be_sent_is_not_tried_again() -> None:
    transport, seen = _transport(httpx.LocalProtocolError("Illegal header value"))
    with pytest.raises(ClientError, match="cannot be sent: Illegal header value") as failed:
        KnowledgeClient("http://x", TOKEN, transport=transport).create("py")
    assert seen == ["POST"]
    assert not isinstance(failed.value, UnreachableError)


def test_a_slow_answer_is_not_asked_for_twice() -> None:
    transport, seen = _transport(httpx.ReadTimeout("slow"))
    with pytest.raises(UnreachableError, match="did not answer in time"):
        KnowledgeClient("http://x", TOKEN, transport=transport).create("py")
    assert seen == ["POST"]


def test_waiting_has_no_end_but_connecting_has() -> None:
    timeouts: list[dict[str, float | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"])
        return httpx.Response(200, json={"data": []})

    client = KnowledgeClient("http://x", TOKEN, timeout_s=9, transport=httpx.MockTransport(answer))
    client.warm("py", wait=True)
    client.warm("py")
    client.remove("py", "a")
    assert [timeout["read"] for timeout in timeouts] == [None, 9, 9]
    assert [timeout["connect"] for timeout in timeouts] == [9, 9, 9]


def test_an_answer_of_another_program_is_recognised() -> None:
    transport, _ = _transport(httpx.Response(200, text="<html>hello</html>"))
    with pytest.raises(RejectedError, match="something else than expected"):
        KnowledgeClient("http://x", TOKEN, transport=transport).stats()


def test_the_client_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, segreuse_tools.knowledge.client, segreuse_tools.commands.kb\n"
        "print([name for name in ('torch', 'vllm', 'pypdf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
