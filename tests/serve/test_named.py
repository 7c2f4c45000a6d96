# SPDX-License-Identifier: Apache-2.0
"""Bodies that name compressed documents: what is looked up, and what stands in the prompt then."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fastapi import HTTPException
from starlette.testclient import TestClient
from vllm import SamplingParams
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message

from tests.serve.vllm_app import MESSAGES, make_app
from vllm_segreuse.features.knowledge.errors import ConflictError, NotFoundError
from vllm_segreuse.features.knowledge.naming import (
    NamedDocument,
    PlaceError,
    check_places,
    cut,
    named,
)
from vllm_segreuse.options.parsing import RequestError
from vllm_segreuse.serve.named import name_documents
from vllm_segreuse.serve.requests import BadOptionError, check_extra_args

NAMES = "segreuse_documents"
ENTRY = "0123456789abcdef" * 2


def document(name: str, *tokens: int, entry: str = ENTRY) -> NamedDocument:
    return NamedDocument(name, entry, np.array(tokens, np.int32))


class Service:
    """Has `handbook/a` and `handbook/b c` in the namespace `handbook`."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], list[str]]] = []

    async def named(self, names: Sequence[str], keys: Sequence[str]) -> list[NamedDocument]:
        self.asked.append((list(names), list(keys)))
        if "handbook/busy" in names:
            raise ConflictError("it is still being compressed: try again")
        if list(keys) != ["handbook"] or not {*names} <= {"handbook/a", "handbook/b c"}:
            raise NotFoundError("there is no document")
        return [document(name, 5, 6) for name in names]


def resolve(body: dict[str, Any], service: Any) -> tuple[NamedDocument, ...]:
    async def main() -> tuple[NamedDocument, ...]:
        await name_documents(body, service)
        return named.get()

    return asyncio.run(main())


def body(*names: str, keys: Any = ("handbook",), **more: Any) -> dict[str, Any]:
    xargs = {NAMES: list(names)} if names else {}
    if keys is not None:
        xargs["extra_keys"] = keys if isinstance(keys, str) else list(keys)
    return {"vllm_xargs": xargs, **more}


def test_names_become_entries() -> None:
    sent, service = body("handbook/b c", "handbook/a"), Service()
    assert [it.name for it in resolve(sent, service)] == ["handbook/b c", "handbook/a"]
    assert sent["vllm_xargs"] == {NAMES: [ENTRY, ENTRY], "extra_keys": ["handbook"]}
    assert service.asked == [(["handbook/b c", "handbook/a"], ["handbook"])]


def test_a_request_that_names_nothing_asks_nobody() -> None:
    for sent in ({}, body(), {"documents": [{"text": "x"}]}, {"documents": "x"}, {"vllm_xargs": 1}):
        before = dict(sent)
        assert resolve(sent, None) == ()
        assert sent == before


def test_documents_of_an_earlier_request_are_forgotten() -> None:
    async def main() -> None:
        await name_documents(body("handbook/a"), Service())
        assert named.get()
        await name_documents({}, Service())
        assert named.get() == ()

    asyncio.run(main())


def test_one_extra_key_may_be_a_string() -> None:
    service = Service()
    assert resolve(body("handbook/a", keys="handbook"), service)
    assert service.asked[0][1] == ["handbook"]


def test_a_template_gets_the_marker_as_text() -> None:
    documents = [
        {"id": "1", "text": "plain"},
        {"base": "handbook", "id": "a", "title": "A"},
        {"base": "handbook", "text": "of somebody's own"},
        {"base": "handbook", "id": "b c"},
    ]
    sent = body(documents=documents)
    assert [it.name for it in resolve(sent, Service())] == ["handbook/a", "handbook/b c"]
    assert sent["documents"] == [
        {"id": "1", "text": "plain"},
        {"base": "handbook", "id": "a", "title": "A", "text": "[[handbook/a]]"},
        {"base": "handbook", "text": "of somebody's own"},
        {"base": "handbook", "id": "b c", "text": "[[handbook/b c]]"},
    ]
    assert "text" not in documents[1], "the body of the client is left as it is"


@pytest.mark.parametrize(
    ("has_admin", "why"), [(False, "an admin token"), (True, "--api-server-count 1")]
)
def test_a_server_without_knowledge_bases_says_why(has_admin: bool, why: str) -> None:
    app = make_app()
    if has_admin:
        app.state.segreuse_service = None
    sent = body("handbook/a", model="m", prompt="x")
    answer = TestClient(app).post("/v1/completions", json=sent)
    assert answer.status_code == 400
    assert why in answer.text


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (body(documents=[{"base": "b", "id": "a", "text": "x"}]), "a base and a text"),
        (body(documents=[{"base": 1, "id": "a"}]), "must be strings"),
        (body("handbook/a", keys=None), "found by extra_keys"),
        (body(*["handbook/a"] * 65), "a list of 1 to 64 strings"),
        ({"vllm_xargs": {NAMES: 5}}, "a list of 1 to 64 strings"),
        ({"vllm_xargs": {NAMES: [5]}}, "the name 5 must be a string"),
        ({"vllm_xargs": {NAMES: ["a\n"]}}, "control characters"),
        ({"vllm_xargs": {NAMES: []}}, "a list of 1 to 64 strings"),
    ],
)
def test_contradictions_are_refused(sent: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(sent, Service())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (body("handbook/z"), 404),
        (body("handbook/a", keys=["other"]), 404),
        (body("handbook/busy"), 409),
    ],
)
def test_what_the_base_refuses_has_its_status(sent: dict[str, Any], status: int) -> None:
    with pytest.raises(HTTPException) as refused:
        resolve(sent, Service())
    assert refused.value.status_code == status


def test_without_knowledge_bases_there_is_nothing_to_name() -> None:
    with pytest.raises(HTTPException) as refused:
        resolve(body("handbook/a"), None)
    assert refused.value.status_code == 400


# Behind vLLM's routes.


def post(path: str, sent: dict[str, Any]) -> Any:
    app = make_app()
    app.state.segreuse_service = Service()
    return TestClient(app, raise_server_exceptions=False).post(path, json={"model": "m"} | sent)


def test_routes_pass_entries_on() -> None:
    sent = {"messages": MESSAGES, "extra_keys": "handbook", "vllm_xargs": {NAMES: ["handbook/a"]}}
    answer = post("/v1/chat/completions", sent)
    assert answer.status_code == 200, answer.text
    assert answer.json()["xargs"] == {NAMES: [ENTRY], "extra_keys": ["handbook"]}


@pytest.mark.parametrize(("name", "status"), [("handbook/z", 404), ("handbook/busy", 409)])
def test_routes_answer_with_the_reason(name: str, status: int) -> None:
    sent = {"prompt": "x", "extra_keys": "handbook", "vllm_xargs": {NAMES: [name]}}
    answer = post("/v1/completions", sent)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_orders_of_the_server_are_no_options_of_clients() -> None:
    for order in ("segreuse_score", "segreuse_copy"):
        sent = {"prompt": "x", "extra_keys": "handbook", "vllm_xargs": {order: [0, 1, 1]}}
        answer = post("/v1/completions", sent)
        assert answer.status_code == 400
        assert f"unknown option '{order}'" in answer.text


def test_names_that_nobody_has_looked_up_are_refused() -> None:
    check_extra_args({"extra_keys": "a", NAMES: [ENTRY]})
    with pytest.raises(BadOptionError, match=r"'handbook/a%2Fb\.md' is no entry"):
        check_extra_args({"extra_keys": "a", NAMES: [ENTRY, "handbook/a/b.md"]})
    assert SamplingParams(extra_args={NAMES: [ENTRY]})


# In the prompt.


def test_a_text_is_cut_at_the_markers_of_named_documents() -> None:
    parts = cut("a [[b/x]][[b/y]] [[b/z]]", [document("b/x", 1), document("b/y", 2)])
    assert [it if isinstance(it, str) else it.tolist() for it in parts] == [
        "a ",
        [1],
        [2],
        " [[b/z]]",
    ]


def test_names_are_no_patterns() -> None:
    assert cut("[[bxa]]", [document("b.a", 1)]) == ["[[bxa]]"]


def test_documents_have_to_stand_in_the_prompt_in_their_order() -> None:
    one, two = document("b/x", 1, 2), document("b/y", 3)
    check_places([9, 1, 2, 9, 3], [one, two])
    with pytest.raises(PlaceError, match=r"'b/y' does not stand"):
        check_places([3, 1, 2], [one, two])
    with pytest.raises(PlaceError) as refused:
        check_places([3], [document("b/sub/x.md", 1), two])
    said = sanitize_message(str(refused.value))  # as a client gets it
    assert "'b/sub%2Fx.md' does not stand" in said
    assert "put its marker, [[BASE/ID]], there" in said


@pytest.mark.parametrize("wrong", [-1, 0x110000, 2**31, 2**32, 2**63, 2**70])
def test_32_token_ids_that_no_model_has_are_a_sentence(wrong: int) -> None:
    with pytest.raises(PlaceError, match="in the prompt a token id is not in 0 to 1114111"):
        check_places([9, wrong, 1, 2], [document("b/x", 1, 2)])
