# SPDX-License-Identifier: Apache-2.0
"""What `bench churn` makes of a server: the real routes of knowledge bases, and a stub of vLLM."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import HTTPException, Request

from bench.harness import BenchError
from bench.suites import churn
from segreuse_tools.knowledge.client import KnowledgeClient
from tests.knowledge.served import TOKEN, Served, served

LOAD = churn.Load(requests=60)


class Stub:
    """Answers completions.

    Attributes:
        asked: bodies that arrived.
        failing: number of the request that is answered with 500.
        share: of the prompt that is reported as reused, by number of the request.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failing = -1
        self.late_share = 1.0

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        number = len(self.asked)
        self.asked.append(body)
        if number == self.failing:
            raise HTTPException(500, "broken")
        share = 1.0 if number < LOAD.requests // 2 else self.late_share
        reused = int(share * len(body["prompt"]))
        report = {"segreuse": {"prefix_tokens": 0, "reused_tokens": reused}}
        return {
            "usage": {"completion_tokens": body["max_tokens"]},
            "kv_transfer_params": report if "extra_keys" in body else None,
        }


@pytest.fixture
def bases(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(churn, "_PROMISED", 0.3)  # half of its blocks may be frozen
    monkeypatch.setattr(churn, "_IDLE_TRIES", 2)
    with served(limit_blocks=3000) as bases:
        bases.engine.vocab_size = 10_000
        yield bases


def churned(bases: Served, stub: Stub) -> churn.Churn:
    bases.app.add_api_route("/v1/completions", stub.complete, methods=["POST"])
    with KnowledgeClient(bases.url, TOKEN) as client:
        one = churn.Churn(bases.url, "m", client, LOAD)
        one.run()
    return one


def test_a_sound_server(bases: Served) -> None:
    stub = Stub()
    result = churned(bases, stub).result()
    summary = result["summary"]
    assert summary["requests"] == LOAD.requests == len(stub.asked)
    assert summary["changes"] == LOAD.requests // churn.REQUESTS_PER_CHANGE
    for figure in ("failed_requests", "failed_changes", "leaked_blocks"):
        assert summary[figure] == 0, summary["first_error"]
    assert summary["leaked_blocks_without_documents"] == 0
    assert summary["reused_first_tenth"] == summary["reused_last_tenth"] == 1
    assert 0.2 < summary["usage"] < 0.3, "nothing but documents holds blocks here"
    assert [row["requests"] for row in result["rows"]] == [LOAD.requests // churn.TENTHS] * 10


def test_requests_bring_what_is_in_a_base_and_some_name_no_key(bases: Served) -> None:
    stub = Stub()
    churned(bases, stub)
    keys = {body.get("extra_keys") for body in stub.asked}
    assert keys == {None, *churn.BASES}


def test_what_is_wrong_is_counted(bases: Served) -> None:
    stub = Stub()
    stub.failing, stub.late_share = 7, 0.1
    bases.engine.held[10**6] += 1  # a block that nobody gives back
    summary = churned(bases, stub).result()["summary"]
    assert summary["failed_requests"] == 1
    assert "500" in str(summary["first_error"])
    assert summary["leaked_blocks"] == summary["leaked_blocks_without_documents"] == 1
    assert summary["reused_last_tenth"] < 0.5 * summary["reused_first_tenth"]


def test_changes_that_fail_are_counted(bases: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: churn.Churn) -> None:
        self._bases.warm("nothing")

    monkeypatch.setattr(churn.Churn, "_replace", refused)
    summary = churned(bases, Stub()).result()["summary"]
    assert summary["failed_changes"] == summary["changes: replace"] > 0
    assert summary["failed_requests"] == 0


def test_changes_of_one_kind_show_nothing(bases: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(churn, "KINDS", {"warm": 1.0})
    one = churned(bases, Stub())
    monkeypatch.undo()
    monkeypatch.setattr(churn, "FULL", LOAD)
    with pytest.raises(BenchError, match="only changed in these ways"):
        one.result()
