# SPDX-License-Identifier: Apache-2.0
"""Where names are bound to API keys, no way in shares one unbound.

Each request goes all the way: the dependency, the endpoint, and vLLM's check of its parameters.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from vllm.exceptions import VLLMValidationError

from tests.serve.vllm_app import BESIDE, GENERATE, KINDS, make_app
from vllm_segreuse.features.knowledge.origin import Origin, origin, own_requests, serving_clients
from vllm_segreuse.options.parsing import bind_extra_keys
from vllm_segreuse.serve.requests import check_extra_args

RIGHTS = {
    hashlib.sha256(b"alice").hexdigest(): ("handbook",),
    hashlib.sha256("clé".encode()).hexdigest(): ("*",),
}
COMPLETIONS = "/v1/completions"
ANONYMOUS = list(bind_extra_keys(("handbook",), "", RIGHTS))


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(make_app({"namespaces": RIGHTS})) as client:
        yield client


def ask(client: TestClient, headers: Any = None, path: str = COMPLETIONS, **options: Any) -> Any:
    """The answer to a request with the extra key `handbook`."""
    body = {**KINDS[path][1], "extra_keys": "handbook", **options}
    return client.post(path, json=body, headers=headers)


def meant(client: TestClient, *headers: tuple[str, str | bytes]) -> Any:
    """The namespace that `handbook` means to the caller."""
    answer = ask(client, list(headers))
    assert answer.status_code == 200, answer.text
    return answer.json()["xargs"]["extra_keys"]


# Who is asking.


@pytest.mark.parametrize(
    "header",
    [
        ("Authorization", "Bearer alice"),
        ("authorization", "bearer alice"),
        ("x-api-key", "alice"),
        ("X-API-Key", "alice"),
        ("Authorization", "Bearer clé".encode()),
        ("x-api-key", "clé".encode()),
    ],
)
def test_who_has_the_right_shares_the_name(client: TestClient, header: Any) -> None:
    assert meant(client, header) == ["handbook"]


@pytest.mark.parametrize(
    ("header", "api_key"),
    [
        (("Authorization", "Bearer mallory"), "mallory"),
        (("x-api-key", "mallory"), "mallory"),
        (("x-api-key", "Bearer alice"), "Bearer alice"),
        (("Authorization", "Basic alice"), ""),
        (("Authorization", "alice"), ""),
        (("Authorization", "Bearer "), ""),
        (("x-api-key", ""), ""),
        (("api", "alice"), ""),
    ],
)
def test_who_has_not_is_alone_under_it(client: TestClient, header: Any, api_key: str) -> None:
    assert meant(client, header) == list(bind_extra_keys(("handbook",), api_key, RIGHTS))


def test_callers_of_either_header_are_told_apart(client: TestClient) -> None:
    keys = [("x-api-key", "one"), ("x-api-key", "two"), ("Authorization", "Bearer three")]
    seen = [meant(client, key) for key in keys]
    assert len({tuple(names) for names in [*seen, ANONYMOUS, ["handbook"]]}) == 5


def test_one_key_in_both_headers_is_one_key(client: TestClient) -> None:
    both = ("Authorization", "Bearer alice"), ("x-api-key", "alice")
    assert meant(client, *both) == ["handbook"]
    basic = ("Authorization", "Basic proxy"), ("x-api-key", "alice")
    assert meant(client, *basic) == ["handbook"]


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer alice"), ("x-api-key", "mallory")],
        [("Authorization", "Bearer mallory"), ("Authorization", "Bearer alice")],
        [("x-api-key", "alice"), ("x-api-key", "mallory")],
    ],
)
def test_different_keys_in_one_request_are_refused(client: TestClient, headers: Any) -> None:
    answer = ask(client, headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "extra_keys"
    assert "different" in answer.json()["error"]["message"]
    assert "alice" not in answer.text
    assert ask(client, headers, extra_keys=None).status_code == 200, (
        "it names nothing that is bound"
    )


@pytest.mark.parametrize("in_xargs", [False, True])
@pytest.mark.parametrize("path", KINDS)
def test_every_checked_endpoint_binds(client: TestClient, path: str, in_xargs: bool) -> None:
    body = {"extra_keys": None, "vllm_xargs": {"extra_keys": ["handbook"]}} if in_xargs else {}
    answer = ask(client, path=path, **body)
    assert answer.json()["xargs"]["extra_keys"] == ANONYMOUS


def test_without_rights_every_caller_shares_the_name() -> None:
    with TestClient(make_app()) as client:
        assert meant(client, ("x-api-key", "mallory")) == ["handbook"]


def test_rights_of_nobody_leave_everybody_alone() -> None:
    with TestClient(make_app({"namespaces": {}})) as client:
        assert meant(client) == ANONYMOUS


def test_a_client_cannot_write_a_bound_key(client: TestClient) -> None:
    assert ask(client, extra_keys=ANONYMOUS).status_code == 400
    assert ask(client, extra_keys=None, vllm_xargs={"extra_keys": ANONYMOUS}).status_code == 400


# Ways in that are not checked.


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("path", [GENERATE, BESIDE])
def test_a_server_refuses_names_that_no_checked_endpoint_hands_in(path: str, trust: bool) -> None:
    options = {"namespaces": RIGHTS, "namespaces_trust_programs": trust}
    with TestClient(make_app(options)) as client:
        for args in ({"extra_keys": ["handbook"]}, {"extra_keys": ANONYMOUS}):
            answer = client.post(path, json={"extra_args": args}, headers={"x-api-key": "alice"})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "extra_keys"
        assert client.post(path, json={"extra_args": {"other": 1}}).status_code == 200


def test_an_endpoint_is_no_program_even_before_the_server_has_started() -> None:
    options = {"namespaces": RIGHTS, "namespaces_trust_programs": True}
    client = TestClient(make_app(options))
    body = {"extra_args": {"extra_keys": ["handbook"]}}
    assert client.post(GENERATE, json=body).status_code == 400
    with client.websocket_connect("/v1/realtime") as websocket:
        websocket.send_json(body)
        assert "extra_keys" in websocket.receive_json()
    # Nor is a checked body enough whose names nobody has bound.
    assert ask(client).status_code == 400


def test_without_rights_they_take_names() -> None:
    with TestClient(make_app()) as client:
        for path in (GENERATE, BESIDE):
            answer = client.post(path, json={"extra_args": {"extra_keys": ["handbook"]}})
            assert answer.status_code == 200


@pytest.mark.parametrize("written_by", Origin)
@pytest.mark.parametrize("trust", [False, True])
def test_only_bound_names_pass_and_those_of_programs_that_are_trusted(
    written_by: Origin, trust: bool
) -> None:
    token = origin.set(written_by)
    passes = written_by in (Origin.BOUND, Origin.OURSELVES)
    passes |= trust and written_by is Origin.UNKNOWN
    try:
        check_extra_args({"extra_keys": ["a"]})
        check_extra_args({"other": 1}, bound=True, trust_programs=trust)
        if passes:
            check_extra_args({"extra_keys": ["a"]}, bound=True, trust_programs=trust)
        else:
            with pytest.raises(VLLMValidationError, match="namespaces"):
                check_extra_args({"extra_keys": ["a"]}, bound=True, trust_programs=trust)
    finally:
        origin.reset(token)


def test_who_says_nothing_is_unknown_and_while_a_server_runs_no_program() -> None:
    assert origin.get() is Origin.UNKNOWN
    check_extra_args({"extra_keys": ["a"]}, bound=True, trust_programs=True)
    with serving_clients():
        with pytest.raises(VLLMValidationError, match="namespaces"):
            check_extra_args({"extra_keys": ["a"]}, bound=True, trust_programs=True)
        with own_requests():
            check_extra_args({"extra_keys": ["a"]}, bound=True)
    check_extra_args({"extra_keys": ["a"]}, bound=True, trust_programs=True)


def test_only_this_process_and_bound_bodies_may_write_what_clients_cannot() -> None:
    order = {"extra_keys": ["a"], "segreuse_freeze": "entry:0:1:0"}
    with pytest.raises(VLLMValidationError, match="segreuse_freeze"):
        check_extra_args(order)
    with own_requests():
        check_extra_args(order)
        assert origin.get() is Origin.OURSELVES
    assert origin.get() is Origin.UNKNOWN
    assert {one for one in Origin if one.is_trusted} == {Origin.BOUND, Origin.OURSELVES}
