# SPDX-License-Identifier: Apache-2.0
import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import BenchError
from bench.suites import observe

LOAD = observe.Load(batches=6, requests=2, document_tokens=32, output_tokens=4)


class _Client:
    """A server that answers at once, and keeps what it was asked."""

    def __init__(self, found: int) -> None:
        self.found = found
        self.asked: list[dict[str, Any]] = []
        self.completions = SimpleNamespace(create=self._create)

    async def __aenter__(self) -> "_Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        """Nothing to close."""

    async def _create(self, **request: Any) -> Any:
        self.asked.append({**request, "prompt": request["extra_body"]["prompt"]})
        observed = "vllm_xargs" in request["extra_body"]
        report = {"segreuse": {"observed": {"reused_tokens": self.found}}} if observed else None
        return SimpleNamespace(model_extra={"kv_transfer_params": report})


def measured(client: _Client, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    monkeypatch.setattr(observe.openai, "AsyncOpenAI", lambda **_: client)
    server: Any = SimpleNamespace(base_url="", model_name="m")
    return asyncio.run(observe.measure(server, LOAD))


def test_both_arms_ask_about_the_same_documents_behind_something_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = _Client(64)
    seconds = measured(client, monkeypatch)
    assert {arm: len(values) for arm, values in seconds.items()} == {"without": 6, "observed": 6}
    documents, asked = client.asked[:2], client.asked[2:]
    assert all("extra_keys" in it["extra_body"] for it in documents)
    observed = [it for it in asked if "extra_keys" in it["extra_body"]]
    assert len(asked) == 2 * len(observed) == 2 * 7 * LOAD.requests
    assert all(it["extra_body"]["vllm_xargs"] == {"segreuse_observe": True} for it in observed)
    for it in asked:
        text = " ".join(map(str, it["prompt"]))
        assert all(" ".join(map(str, document["prompt"])) in text for document in documents)
    # A prefix that was there before would be found by one arm only.
    assert len({tuple(it["prompt"][:17]) for it in asked}) == len(asked)


def test_traffic_in_which_nothing_is_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="of the arm 'observed' observed 0 tokens"):
        measured(_Client(0), monkeypatch)
