# SPDX-License-Identifier: Apache-2.0
"""What no endpoint can read gets HTTP 400, as from vLLM alone, however it is sent."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.knowledge.admin_app import TOKEN, admin_app
from tests.serve.vllm_app import BESIDE, GENERATE, INVOCATIONS, make_app
from vllm_segreuse.features.knowledge.schemas import PREFIX

DEEP = 200_000
NOT_JSON: dict[str, bytes] = {
    "deep": b'{"prompt": ' + b"[" * DEEP,
    "deep, closed": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep list": b"[" * DEEP + b"]" * DEEP,
    "deep option": b'{"prompt": "a", "extra_keys": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "cut": b'{"model": "m", "prompt": "a',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "zero bytes": b"\0" * 9,
    "a huge number": b'{"prompt": 1' + b"0" * 5000 + b"}",
    "two values": b"{} {}",
}
NO_OBJECT = {"empty": b"", "list": b"[1]", "null": b"null", "number": b"5", "text": b'"a"'}
ODD = {
    "levels": b'{"model": "m", "prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
    "the same twice": b'{"prompt": "a", "prompt": {"b": 1}}',
    "NaN": b'{"prompt": NaN, "extra_keys": NaN}',
    "half a character": b'{"prompt": "a", "extra_keys": "\\ud800"}',
}
TYPES = ["application/json", "text/plain", "application/json; charset=utf-16", None]
OTHER_TYPES = ["application/x-www-form-urlencoded", "a/b/c"]

by_type = pytest.mark.parametrize("content_type", TYPES, ids=str)
bad_bodies = pytest.mark.parametrize("body", [*NOT_JSON.values()], ids=[*NOT_JSON])


def send(client: TestClient, path: str, body: bytes, content_type: str | None) -> Any:
    headers = {"Content-Type": content_type} if content_type else {}
    return client.post(path, content=body, headers=headers)


# vLLM's own routes.


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(make_app(), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def stock() -> TestClient:
    return TestClient(make_app(stock=True), raise_server_exceptions=False)


@by_type
@bad_bodies
@pytest.mark.parametrize("path", [INVOCATIONS, GENERATE])
def test_what_is_no_json_is_400(
    client: TestClient, path: str, body: bytes, content_type: str | None
) -> None:
    answer = send(client, path, body, content_type)
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 2000


@pytest.mark.parametrize("path", ["/elsewhere", BESIDE])
def test_endpoints_that_parse_on_their_own_are_400_too(client: TestClient, path: str) -> None:
    answer = send(client, path, NOT_JSON["deep"], "application/json")
    assert answer.status_code == 400
    assert "too deeply" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", [*TYPES, *OTHER_TYPES], ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", INVOCATIONS])
def test_it_is_what_vllm_alone_answers(
    client: TestClient, stock: TestClient, path: str, content_type: str | None
) -> None:
    for name, body in (NOT_JSON | NO_OBJECT | ODD).items():
        ours = send(client, path, body, content_type)
        alone = send(stock, path, body, content_type)
        if alone.status_code == 500:
            assert path == INVOCATIONS, "only endpoints that parse on their own"
        elif "extra_keys" not in ours.text:
            assert ours.status_code == alone.status_code, (name, ours.text)
            assert ours.text == alone.text or name not in NOT_JSON
        assert ours.status_code == 400 or alone.status_code == 200, (name, ours.text)


# The administrator's.

POSTS = ["enable", "disable", "knowledge-bases", "knowledge-bases/b/documents"]
POSTS += ["knowledge-bases/b/warm"]


@pytest.fixture(scope="module")
def admin() -> Iterator[TestClient]:
    with TestClient(admin_app(), raise_server_exceptions=False) as client:
        token = {"Authorization": f"Bearer {TOKEN}"}
        client.post(f"{PREFIX}/knowledge-bases", json={"name": "b"}, headers=token)
        yield client


@by_type
@pytest.mark.parametrize("path", POSTS)
def test_32_the_administrators_routes_refuse_it_as_well(
    admin: TestClient, path: str, content_type: str | None
) -> None:
    token = {"Authorization": f"Bearer {TOKEN}"}
    headers = {"Content-Type": content_type} if content_type else {}
    for name, body in NOT_JSON.items():
        answer = admin.post(f"{PREFIX}/{path}", content=body, headers=headers | token)
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request"
        assert admin.post(f"{PREFIX}/{path}", content=body, headers=headers).status_code == 401


@pytest.mark.parametrize("levels", [50, 250, 500, 900, 950, 980, 1000])
def test_32_no_depth_is_an_error_of_ours(admin: TestClient, levels: int) -> None:
    token = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    deep = b"[" * levels + b"]" * levels
    for body in (
        deep,
        b'{"name": ' + deep + b"}",
        b'{"documents": ' + deep + b"}",
        b'{"documents": [{"id": "a", "text": "x", "metadata": {"k": ' + deep + b"}}]}",
    ):
        for path in POSTS[2:]:
            answer = admin.post(f"{PREFIX}/{path}", content=body, headers=token)
            assert answer.status_code in (400, 202), (path, answer.text)
            assert answer.status_code == 400 or levels < 500
    # What was taken can be shown.
    assert admin.get(f"{PREFIX}/knowledge-bases/b/documents", headers=token).status_code == 200
