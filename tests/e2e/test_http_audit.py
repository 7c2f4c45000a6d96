# SPDX-License-Identifier: Apache-2.0
"""Audits of a real server: metrics, log, route, and a namespace that falls back."""

import json
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.shapes import make_model, passages
from tests.e2e.server import ADMIN_TOKEN, Server
from tests.reports import Whole

pytestmark = pytest.mark.slow(
    "a server of its own", instead="e2e/test_audit e2e/test_http_api audit/test_audits"
)

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
DOCUMENTS = [text[:2500] for _, text in passages() if len(text) > 2500][:2]
FULL = {"segreuse_policy": "sparsex", "segreuse_dense_layers": 0, "segreuse_recompute_ratio": 1.0}
SHIFT = {"segreuse_policy": "shift"}
WAYS: dict[str, dict[str, Any]] = {
    "chat": {},
    "stream": {"stream": True},
    "sampled": {"temperature": 1.0, "n": 2},
    "ended by a stop string": {"stop": [*"etao"]},
}
AUDIT = """
audit:
  share: 1.0
  per_minute: 6000
  log: {log}
  log_text: true
  classes: {{"bad": bad, "good": good}}
  max_kl: 0.001
  min_audits: 3
  on_drift: fallback
  recover_s: 3600
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    config = log.with_suffix(".yaml")
    config.write_text(AUDIT.format(log=log))
    flags = ["--segreuse-config", str(config)]
    with Server(make_model("llama"), flags, {"VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN}) as running:
        yield running


def post(server: Server, prompt: str, name: str, xargs: dict[str, Any], **body: Any) -> Any:
    given = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, **body}
    given |= {"extra_keys": [name], "vllm_xargs": xargs}
    return server.post("/v1/completions", given).raise_for_status().json()


def know(server: Server, name: str) -> str:
    """A namespace that knows the documents; each has a record of its own."""
    for document in DOCUMENTS:
        post(server, document, name, {})
    return name


def shuffled(number: int) -> str:
    return f"Request number {number}. " + "".join(reversed(DOCUMENTS))


def audits(server: Server) -> dict[str, Any]:
    return server.get("/plugins/segreuse/v1/audits", headers=ADMIN).raise_for_status().json()


def until(reached: Callable[[dict[str, Any]], bool], server: Server) -> dict[str, Any]:
    """What the route shows, once it is so."""
    last = time.monotonic() + 60
    while not reached(found := audits(server)):
        assert time.monotonic() < last, found
        time.sleep(0.05)
    return found


def compared(server: Server) -> int:
    return int(audits(server)["outcomes"].get("compared", 0))


def audited(server: Server, ask: Callable[[], Any]) -> Any:
    """What was answered, once it has been audited."""
    before = compared(server)
    answer = ask()
    until(lambda found: found["outcomes"].get("compared", 0) > before, server)
    return answer


def test_what_an_audit_leaves_behind(server: Server, log: Path) -> None:
    name = know(server, "secret name")
    answer = audited(server, lambda: post(server, shuffled(0), name, SHIFT))
    report = Whole(answer["kv_transfer_params"]["segreuse"])
    assert set(report) >= {"policy", "reused_tokens"}
    assert "fallback" not in report
    line = json.loads(log.read_text().splitlines()[-1])
    assert line["outcome"] == "compared"
    assert line["request_id"].startswith(answer["id"])
    assert line["found"]["prompt_tokens"] == report["prompt_tokens"]
    assert line["planned"]["reused_tokens"] == report["reused_tokens"]
    assert line["materialised"]["recomputed_tokens"] == report["recomputed_tokens"] == 0
    assert (line["policy"], line["namespace_class"]) == ("shift", "other")
    assert line["kl"] > 0
    assert line["compared_tokens"] == 6
    assert "Request number 0." in line["prompt"], "it was asked for"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    metrics = server.get("/metrics").text
    labels = 'engine="0",model_name="m",namespace_class="other"'
    for sample in (
        f'vllm:segreuse_audit_kl_count{{{labels},policy="shift"}} 1.0',
        f'vllm:segreuse_audits_total{{{labels},outcome="compared",policy="shift"}} 1.0',
    ):
        assert sample in metrics
    assert name not in metrics + log.read_text(), "a namespace's name is nobody else's business"


def test_references_are_no_requests_of_vllms(server: Server) -> None:
    def finished() -> float:
        found = [
            float(sample.rpartition(" ")[2])
            for sample in server.get("/metrics").text.splitlines()
            if sample.startswith("vllm:request_success_total")
        ]
        return sum(found)

    know(server, "counted")
    before = finished()
    audited(server, lambda: post(server, shuffled(1), "counted", FULL))
    assert finished() == before + 1


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_answer_is_audited(way: str, server: Server) -> None:
    messages = [{"role": "user", "content": shuffled(2)}]
    body = {"model": "m", "messages": messages, "max_tokens": 5, "extra_keys": [know(server, way)]}
    body |= WAYS[way]
    audited(server, lambda: server.post("/v1/chat/completions", body).raise_for_status())


def test_a_client_that_goes_away_leaves_nothing_behind(server: Server) -> None:
    """What it has got of its answer is compared."""
    until(lambda found: found["under_way"] == 0, server)  # those of other tests
    name, before = know(server, "away"), compared(server)
    body = {"model": "m", "prompt": shuffled(5), "max_tokens": 2000, "ignore_eos": True}
    body |= {"stream": True, "extra_keys": [name]}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        response.raise_for_status()
        first = json.loads(next(response.iter_lines()).removeprefix("data: "))
        assert first["choices"][0]["finish_reason"] is None
    until(lambda _: compared(server) > before, server)
    found = until(lambda found: found["under_way"] == 0, server)
    assert found["failed"] is False


def classes(found: dict[str, Any]) -> list[str]:
    return [each["namespace_class"] for each in found["drifted"]]


def test_a_namespace_falls_back_and_others_do_not(server: Server) -> None:
    for name in ("good", "bad"):
        know(server, name)
    for number in range(10, 13):
        audited(server, lambda number=number: post(server, shuffled(number), "good", FULL))
    for number in range(20, 23):
        audited(server, lambda number=number: post(server, shuffled(number), "bad", SHIFT))
    found = until(
        lambda found: any(x["namespace_class"] == "bad" for x in found["drifted"]), server
    )
    assert [each["namespace_class"] for each in found["drifted"]].count("good") == 0
    report = post(server, shuffled(30), "bad", SHIFT)["kv_transfer_params"]["segreuse"]
    assert (report["bypass_reason"], report["fallback"]) == ("fallback", True)
    assert report["reused_tokens"] == 0
    report = post(server, shuffled(31), "good", FULL)["kv_transfer_params"]["segreuse"]
    assert report["bypass_reason"] is None
    assert report["reused_tokens"] > 0
    assert "audits of namespace" in server.log_text()
    metrics = server.get("/metrics").text
    drifted = 'change="drifted",engine="0",model_name="m",namespace_class="bad"'
    assert f"vllm:segreuse_audit_drifted_total{{{drifted}}} 1.0" in metrics
    assert 'namespace_class="good"' in metrics
