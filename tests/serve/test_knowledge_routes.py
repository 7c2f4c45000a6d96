# SPDX-License-Identifier: Apache-2.0
"""The routes of knowledge bases: what they take, what they answer, and that nothing breaks them."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import settings

from tests.knowledge.admin_app import TOKEN, admin_app
from tests.knowledge.fuzz import fuzz, served_by
from vllm_segreuse.features.knowledge.schemas import PREFIX

BASES = f"{PREFIX}/knowledge-bases"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(admin_app(), headers=ADMIN) as client:
        assert client.post(BASES, json={"name": "base"}).status_code == 201
        yield client


def add(client: TestClient, **body: Any) -> Any:
    body = {"documents": [{"id": "a", "token_ids": [1, 2, 3]}], "wait": True} | body
    return client.post(f"{BASES}/base/documents", json=body)


def test_a_documents_life(client: TestClient) -> None:
    assert add(client).json()["data"][0]["status"] == "warm"
    assert client.get(f"{BASES}/base").json()["documents"]["warm"] == 1
    assert client.get(f"{BASES}/base/documents/a").json()["tokens"] == 3
    assert client.delete(f"{BASES}/base/documents/a").status_code == 204
    assert client.get(f"{BASES}/base/documents/a").status_code == 404
    assert client.get(f"{PREFIX}/stats").json()["blocks"]["frozen"] == 0


@pytest.mark.parametrize("document_id", ["a/b.txt", "ü ?#%", "https://x/y", "a/", "/", "+"])
def test_any_id_finds_its_document(client: TestClient, document_id: str) -> None:
    add(client, documents=[{"id": document_id, "text": "text"}])
    answer = client.get(f"{BASES}/base/documents/{quote(document_id, safe='')}")
    assert answer.json()["id"] == document_id


@pytest.mark.parametrize("document_id", ["a", "a/b.txt", "a/text", "ü ?#%", "a/", "/"])
def test_the_text_of_a_document_is_shown_with_its_tokens(
    client: TestClient, document_id: str
) -> None:
    text = "# Title\n\n- naïve  [[x]]\n" * 4
    add(client, documents=[{"id": document_id, "text": text}, {"id": "other", "text": "x"}])
    path = f"{BASES}/base/texts/{quote(document_id, safe='')}"
    shown = client.get(path).json()
    token_ids = [2 + ord(char) for char in text]
    assert shown == {"id": document_id, "base": "base", "text": text} | {
        "is_exact": True, "token_ids": token_ids
    }  # fmt: skip
    add(client, documents=[{"id": document_id, "text": "another"}])
    assert client.get(path).json()["text"] == "another"
    client.delete(f"{BASES}/base/documents/{quote(document_id, safe='')}")
    assert client.get(path).status_code == 404


def test_a_text_of_which_the_tokenizer_makes_other_tokens_is_told(client: TestClient) -> None:
    add(client, documents=[{"id": "a", "token_ids": [0, 1, 50]}])
    shown = client.get(f"{BASES}/base/texts/a").json()
    assert (shown["is_exact"], shown["token_ids"]) == (False, [0, 1, 50])


def test_a_compressed_document_has_its_whole_text(client: TestClient) -> None:
    add(client, documents=[{"id": "a", "text": "a text of some letters", "keep": 0.5}])
    assert client.get(f"{BASES}/base/texts/a").json()["text"] == "a text of some letters"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("base/texts/none", "there is no document 'none' in knowledge base 'base'"),
        ("none/texts/a", "there is no knowledge base 'none'"),
    ],
)
def test_a_text_that_is_not_there_is_404(client: TestClient, path: str, message: str) -> None:
    answer = client.get(f"{BASES}/{path}")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, message)
    assert client.get(f"{BASES}/{path}", headers={"Authorization": ""}).status_code == 401


def test_answered_at_once_or_when_done(client: TestClient) -> None:
    assert add(client, wait=False).status_code == 202
    assert add(client, wait=True).status_code == 200
    assert client.post(f"{BASES}/base/warm", json={}).status_code == 202


BAD: list[tuple[Any, str]] = [
    ({"documents": []}, "documents"),
    ({"documents": [{"id": "a"}]}, "documents.0"),
    ({"documents": [{"id": "a", "text": "x", "token_ids": [1]}]}, "documents.0"),
    ({"documents": [{"id": "a/../b", "text": "x"}]}, "documents.0.id"),
    ({"documents": [{"id": "a\n", "text": "x"}]}, "documents.0.id"),
    ({"documents": [{"id": "x" * 600, "text": "x"}]}, "documents.0.id"),
    ({"documents": [{"id": "a", "text": ""}]}, "documents.0.text"),
    ({"documents": [{"id": "a", "token_ids": [True]}]}, "documents.0.token_ids.0"),
    ({"documents": [{"id": "a", "token_ids": [-1]}]}, "documents.0.token_ids.0"),
    ({"documents": [{"id": "a", "token_ids": [10**6]}]}, "documents.0.token_ids"),
    ({"documents": [{"id": "a", "text": "x", "metadata": {"k": "v" * 20000}}]}, None),
    ({"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]}, None),
    ({"documents": [{"id": "a", "text": "x"}], "more": 1}, "more"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=range(len(BAD)))
def test_bad_documents_are_400_and_name_the_field(
    client: TestClient, body: Any, param: str | None
) -> None:
    answer = client.post(f"{BASES}/base/documents", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request"
    assert param is None or error["param"] == param
    assert client.get(f"{BASES}/base/documents").json()["data"] == []


RAW = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"documents": [{"id": "a", "text": "\\ud800"}]}',
    b'{"documents": [{"id": "\\ud800", "text": "x"}]}',
    b'{"documents": [{"id": "a", "text": "x", "metadata": {"k": NaN}}]}',
    b'{"documents": [{"id": "a", "text": "x", "metadata": {"\\udc00": 1}}]}',
    b'{"documents": ' + b"[" * 100_000 + b"}",
    b'{"documents": [{"id": "a", "text": "x", "metadata": {"k": '
    + b"[" * 900
    + b"]" * 900
    + b"}}]}",
    b'{"documents": [{"id": "a", "token_ids": [1' + b"0" * 5000 + b"]}]}",
]


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_32_bodies_that_are_no_proper_json_are_400(client: TestClient, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post(f"{BASES}/base/documents", content=raw, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request"


BODY = "the body must be a JSON object in UTF-8, sent with Content-Type: application/json"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", BODY),
        (b"null", BODY),
        (b"[]", BODY),
        (b'{"name": }', f"{BODY}: Expecting value at character 9"),
        ('{"name": "\xfc"}'.encode("latin-1"), f"{BODY}: 'utf-8' codec can't decode byte 0xfc"),
        (b'{"name": 1' + b"0" * 5000 + b"}", f"{BODY}: Exceeds the limit"),
        (b'{"name": ' + b"[" * 100_000, "the body is nested too deeply"),
    ],
)
def test_a_body_that_is_no_object_is_told_what_one_is(
    client: TestClient, raw: bytes, said: str
) -> None:
    headers = {"Content-Type": "application/json"}
    error = client.post(BASES, content=raw, headers=headers).json()["error"]
    assert error["message"].startswith(said)
    assert error["param"] is None, "there is no field of this name"


def test_a_body_that_is_not_called_json_is_told_how_to_send_it(client: TestClient) -> None:
    """`curl -d` calls every body a form."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.post(BASES, content=b'{"name": "new"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, BODY)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", f"limit={'9' * 5000}"])
def test_bad_pages_are_400(client: TestClient, query: str) -> None:
    assert client.get(f"{BASES}?{query}").status_code == 400


def test_pages_hold_as_many_as_are_asked_for_and_100_unless(client: TestClient) -> None:
    for number in range(101):
        client.post(BASES, json={"name": f"base{number:03}"})
    first = client.get(BASES).json()
    assert len(first["data"]) == 100
    rest = client.get(BASES, params={"after": first["next"]}).json()
    assert len(rest["data"]) == 2
    assert len(client.get(f"{BASES}?limit=1").json()["data"]) == 1
    assert len(client.get(f"{BASES}?limit=1000").json()["data"]) == 102
    assert client.get(BASES, params={"after": "x" * 4096}).json() == {"data": [], "next": None}
    assert client.get(BASES, params={"after": "x" * 4097}).status_code == 400
    add(client, documents=[{"id": f"{n:03}", "text": "a"} for n in range(3)])
    documents = f"{BASES}/base/documents"
    assert [d["id"] for d in client.get(f"{documents}?limit=2").json()["data"]] == ["000", "001"]
    assert [d["id"] for d in client.get(f"{documents}?after=001").json()["data"]] == ["002"]


def test_deleting_is_done_at_once_and_again(client: TestClient) -> None:
    add(client)
    for _ in range(2):
        answer = client.delete(f"{BASES}/base")
        assert (answer.status_code, answer.content) == (204, b"")
    assert client.get(f"{BASES}/base").status_code == 404
    assert client.get(f"{BASES}/base/documents").status_code == 404


def test_warming_waits_if_it_is_told_to(client: TestClient) -> None:
    add(client)
    answer = client.post(f"{BASES}/base/warm", json={"ids": ["a"], "wait": True})
    assert answer.status_code == 200
    assert [document["status"] for document in answer.json()["data"]] == ["warm"]


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "ü", "x" * 129, "a\n"])
def test_bad_names_are_400(client: TestClient, name: str) -> None:
    assert client.post(BASES, json={"name": name}).status_code == 400


def test_24_no_room_is_507(client: TestClient) -> None:
    answer = add(client, documents=[{"id": "a", "token_ids": [5] * 500}])
    assert answer.status_code == 507
    assert answer.json()["error"]["type"] == "insufficient_storage"


def test_25_another_base_of_the_same_name_is_409(client: TestClient) -> None:
    assert client.post(BASES, json={"name": "base"}).status_code == 200
    answer = client.post(BASES, json={"name": "base", "extra_key": "other"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "name")


def test_the_description_names_these_routes_only(client: TestClient) -> None:
    description = client.get(f"{PREFIX}/openapi.json").json()
    assert description["servers"] == [{"url": PREFIX}]
    assert len(description["paths"]) == 13


ALWAYS = {"4XX", "503"}
"""Refusals, and what every route of knowledge bases answers where there are none."""

ONE, ITS = "/knowledge-bases/{name}", "/knowledge-bases/{name}/documents/{document_id}"
ANSWERS = {
    ("post", "/knowledge-bases"): {"200", "201"},
    ("get", "/knowledge-bases"): {"200"},
    ("get", ONE): {"200"},
    ("delete", ONE): {"204"},
    ("post", f"{ONE}/documents"): {"200", "202", "507"},
    ("get", f"{ONE}/documents"): {"200"},
    ("get", ITS): {"200"},
    ("delete", ITS): {"204"},
    ("get", f"{ONE}/texts/{{document_id}}"): {"200"},
    ("post", f"{ONE}/warm"): {"200", "202"},
    ("get", "/stats"): {"200"},
    ("get", "/holdings"): {"200"},
}


def test_the_description_says_what_each_route_answers(client: TestClient) -> None:
    paths = client.get(f"{PREFIX}/openapi.json").json()["paths"]
    described = {
        (method, path): {*operation["responses"]} - {"422"}
        for path, operations in paths.items()
        for method, operation in operations.items()
        if operation["tags"] == ["knowledge bases"]
    }
    assert described == {route: answers | ALWAYS for route, answers in ANSWERS.items()}
    for operations in paths.values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if status[0] in "45" and status != "422":
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}


@pytest.mark.parametrize(("method", "path"), ANSWERS)
def test_without_knowledge_bases_every_route_answers_503(method: str, path: str) -> None:
    with TestClient(app := admin_app(), headers=ADMIN) as client:
        app.state.admin.state.service = None
        body = {"documents": [{"id": "a", "text": "x"}]} if path.endswith("/documents") else {}
        body = {"name": "b"} if path == "/knowledge-bases" else body
        url = PREFIX + path.format(name="b", document_id="a")
        answer = client.request(method, url, json=body if method == "post" else None)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "unavailable"


@pytest.mark.filterwarnings("ignore")
def test_32_a_little_fuzzing_finds_no_5xx() -> None:
    # `python -m tests.knowledge.fuzz --engine` does the same at length, on the real server.
    with served_by(engine=False) as url, httpx.Client(base_url=url, timeout=60) as client:
        statuses = fuzz(client, TOKEN, requests=settings().max_examples // 4 * 2)
    assert statuses[401] == statuses.total() / 2
    assert len(statuses) > 3, f"only {statuses}"
