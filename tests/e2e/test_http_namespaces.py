# SPDX-License-Identifier: Apache-2.0
"""One server whose names are bound to API keys: who shares what, and that no other way in does."""

from typing import Any

import pytest

from bench.shapes import passages
from tests.e2e.server import Server

DOCUMENT = next(text[:1500] for _, text in passages() if len(text) > 1500)


@pytest.fixture
def server(bound_server: Server) -> Server:
    return bound_server


def reused(server: Server, preamble: str, headers: Any) -> int:
    body = {"model": "m", "prompt": preamble + DOCUMENT, "max_tokens": 1, "extra_keys": "handbook"}
    answer = server.post("/v1/completions", body, headers=headers).raise_for_status().json()
    return int(answer["kv_transfer_params"]["segreuse"]["reused_tokens"])


def test_callers_share_what_their_keys_may_in_whichever_header_they_are(server: Server) -> None:
    assert reused(server, "One. ", {"Authorization": "Bearer alice"}) == 0
    assert reused(server, "Number two. ", {"x-api-key": "bob"}) > 0
    assert reused(server, "And three. ", {"x-api-key": "mallory"}) == 0
    assert reused(server, "The fourth. ", {"x-api-key": "eve"}) == 0
    assert reused(server, "A fifth one. ", {}) == 0
    assert reused(server, "Then a sixth. ", {"x-api-key": "mallory"}) > 0, "it has met its own"


def test_two_keys_in_one_request_are_400(server: Server) -> None:
    headers = {"Authorization": "Bearer alice", "x-api-key": "mallory"}
    body = {"model": "m", "prompt": "a", "max_tokens": 1, "extra_keys": "handbook"}
    answer = server.post("/v1/completions", body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "extra_keys"


def test_endpoints_that_do_not_know_the_caller_take_no_names(server: Server) -> None:
    def generate(extra_args: Any) -> Any:
        params = {"max_tokens": 1, "extra_args": extra_args}
        body = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": params}
        return server.post("/inference/v1/generate", body, headers={"x-api-key": "alice"})

    answer = generate({"extra_keys": ["handbook"]})
    assert answer.status_code == 400, answer.text
    assert "namespaces" in answer.json()["error"]["message"]
    assert generate(None).status_code == 200
    assert server.is_healthy()
