# SPDX-License-Identifier: Apache-2.0
"""One server, `vllm-segreuse serve`: requests, reports, bad input, metrics, kill switch."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.shapes import passages
from segreuse_tools.commands import explain as explain_cli
from tests.e2e.http_malformed import deep_bodies
from tests.e2e.server import ADMIN_TOKEN, Server
from tests.reports import Whole
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.serve.requests import ENDPOINTS

pytestmark = pytest.mark.patches(
    "api_server",
    "async_llm",
    "detokenizer",
    "engine_core",
    "envs",
    "omp_processes",
    "openai_protocols",
    "openai_streams",
    "prefix_cache_stats",
)

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
SWITCH = "/plugins/segreuse/v1"
DOCUMENTS = [text[:2500] for _, text in passages() if len(text) > 2500][:2]
_preambles = itertools.count()


@pytest.fixture(scope="module")
def server(shared_server: Server) -> Server:
    for document in DOCUMENTS:
        shared_server.post("/v1/completions", completion(document)).raise_for_status()
    return shared_server


@pytest.fixture(autouse=True)
def engine_survives(server: Server) -> Iterator[None]:
    yield
    assert server.is_healthy(), server.log_tail()


def completion(prompt: str | list[str], **options: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "temperature": 0}
    return {**body, "extra_keys": ["docs"], **options}


def shuffled() -> str:
    """The known documents in the other order, behind a preamble that was never there before."""
    return f"Request number {next(_preambles)}. " + "".join(reversed(DOCUMENTS))


def chat(**options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": shuffled()}]
    body = {"model": "m", "messages": messages, "max_tokens": 3, "temperature": 0}
    return {**body, "extra_keys": ["docs"], **options}


def check_report(report: dict[str, Any], *, policy: str = "focus", of_equal: bool = False) -> None:
    """It reuses most of a prompt; `of_equal`: as another choice of the request has computed it."""
    assert report["policy"] == policy
    assert report["bypass_reason"] is None
    assert report["reused_tokens"] > report["prompt_tokens"] // 2
    total = report["prefix_tokens"] + report["reused_tokens"] + report["new_tokens"]
    assert total == report["prompt_tokens"]
    assert 0 <= report["recomputed_tokens"] <= report["reused_tokens"]
    assert report["matches"] >= 2
    assert report["in_full"] is False
    if of_equal:
        assert (report["recomputed_tokens"], report["new_tokens"]) == (0, 1)
    unmeasured = of_equal or policy == "shift"
    assert report["drift"] is None if unmeasured else report["drift"] > 0


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line, object_pairs_hook=each_once) for line in lines[:-1]]


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a name occurs twice: {pairs}"
    return dict(pairs)


# Requests and their reports.


def test_completion_reports_reuse(server: Server) -> None:
    body = server.post("/v1/completions", completion(shuffled())).raise_for_status().json()
    report = Whole(body["kv_transfer_params"]["segreuse"])
    check_report(report)
    assert report["prompt_tokens"] == body["usage"]["prompt_tokens"]
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == report["prefix_tokens"] + report["reused_tokens"] - report["recomputed_tokens"]


def test_chat_reports_reuse(server: Server) -> None:
    body = server.post("/v1/chat/completions", chat()).raise_for_status().json()
    check_report(Whole(body["kv_transfer_params"]["segreuse"]))


def test_options_in_vllm_xargs_count(server: Server) -> None:
    xargs = {"extra_keys": ["docs"], "segreuse_policy": "shift"}
    body = completion(shuffled(), vllm_xargs=xargs)
    del body["extra_keys"]
    answer = server.post("/v1/completions", body).raise_for_status().json()
    report = Whole(answer["kv_transfer_params"]["segreuse"])
    check_report(report, policy="shift")
    assert report["recomputed_tokens"] == 0


def test_07_without_extra_keys_there_is_no_reuse_and_no_report(server: Server) -> None:
    body = completion(shuffled(), extra_keys=None)
    answer = server.post("/v1/completions", body).raise_for_status().json()
    assert answer["kv_transfer_params"] is None
    assert not answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_09_other_keys_are_another_namespace(server: Server) -> None:
    for keys in ("other", ["do", "cs"], ["docs", "x"]):
        body = completion(shuffled(), extra_keys=keys)
        answer = server.post("/v1/completions", body).raise_for_status().json()
        assert answer["kv_transfer_params"]["segreuse"]["reused_tokens"] == 0


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_last_chunk_of_a_stream_carries_the_report(
    server: Server, endpoint: str, usage: bool
) -> None:
    body = chat() if "chat" in endpoint else completion(shuffled())
    options = {"stream_options": {"include_usage": True}} if usage else {}
    *chunks, last = events(server.post(endpoint, {**body, "stream": True, **options}))
    check_report(Whole(last["kv_transfer_params"]["segreuse"]))
    assert (last["choices"] == []) == usage
    finished = chunks.pop() if usage else last
    assert finished["choices"][0]["finish_reason"] == "length"
    assert all(chunk.get("kv_transfer_params") is None for chunk in chunks)
    # From 0.33 on vLLM has it where a choice is finished.
    assert finished.get("kv_transfer_params") in (None, last["kv_transfer_params"])


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_and_prompts(server: Server, stream: bool) -> None:
    for of_equal, body in (
        (True, completion(shuffled(), n=2, temperature=1, seed=1, stream=stream)),
        (False, completion([shuffled(), shuffled()], stream=stream)),
    ):
        response = server.post("/v1/completions", body)
        last = events(response)[-1] if stream else response.raise_for_status().json()
        check_report(Whole(last["kv_transfer_params"]["segreuse"]), of_equal=of_equal)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_api(server: Server, stream: bool) -> None:
    body = {"model": "m", "input": shuffled(), "max_output_tokens": 3, "stream": stream}
    response = server.post("/v1/responses", {**body, "extra_keys": "docs"}).raise_for_status()
    if stream:
        data = [line for line in response.text.splitlines() if line.startswith("data: {")]
        answer = json.loads(data[-1].removeprefix("data: "))["response"]
    else:
        answer = response.json()
    check_report(Whole(answer["kv_transfer_params"]["segreuse"]))


def test_official_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="m", prompt=shuffled(), max_tokens=3, stream=True, extra_body={"extra_keys": ["docs"]}
    )
    *_, last = stream
    check_report(Whole(last.kv_transfer_params["segreuse"]))  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="extra_keys=5"):
        client.completions.create(model="m", prompt="a", extra_body={"extra_keys": 5})


def test_too_short_a_prompt_is_bypassed_with_a_reason(server: Server) -> None:
    answer = server.post("/v1/completions", completion("Hello there.")).raise_for_status().json()
    report = Whole(answer["kv_transfer_params"]["segreuse"])
    assert report["reused_tokens"] == 0
    assert report["bypass_reason"]


# Bad input.

BAD_KEYS = [5, 1.5, True, {}, [], "", [""], ["a", 5], [["a"]], "a\u0000", "a\n", "\ud800"]
BAD_OPTIONS = [
    {"segreuse_polcy": "shift"},
    {"segreuse_policy": "fastest"},
    {"segreuse_policy": ["shift"]},
    {"segreuse_recompute_ratio": 1.01},
    {"segreuse_recompute_ratio": "0.1"},
    {"segreuse_dense_layers": -1},
    {"segreuse_dense_layers": True},
    {"segreuse_overflow_tokens": 10**30},
    {"segreuse_min_reused_tokens": 0},
    {"extra_keys": []},
]


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_01_06_bad_values_are_400_with_the_options_name(
    server: Server, endpoint: str, stream: bool
) -> None:
    prompt = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
    }[endpoint]
    cases = [("extra_keys", {"extra_keys": keys}) for keys in BAD_KEYS]
    cases += [(next(iter(xargs)), {"vllm_xargs": xargs}) for xargs in BAD_OPTIONS]
    for named, bad in cases:
        response = server.post(endpoint, {"model": "m", "stream": stream, **prompt, **bad})
        assert response.status_code == 400, (bad, response.text)
        error = response.json()["error"]
        assert error["param"] == named
        assert named in error["message"]
        assert len(error["message"]) < 500


def test_01_not_a_number_is_400(server: Server) -> None:
    nan = float("nan")
    for bad in ({"extra_keys": nan}, {"vllm_xargs": {"segreuse_recompute_ratio": nan}}):
        response = server.post("/v1/completions", {"model": "m", "prompt": "a", **bad})
        assert response.status_code == 400, response.text


@pytest.mark.parametrize("in_xargs", [False, True])
@pytest.mark.parametrize(
    "keys", [["k"] * 10**6, [[]] * 10**6, "x" * 2**20], ids=["10^6 keys", "10^6 lists", "1 MB"]
)
def test_02_huge_values_are_refused_with_a_short_message(
    server: Server, keys: Any, in_xargs: bool
) -> None:
    bad = {"vllm_xargs": {"extra_keys": keys}} if in_xargs else {"extra_keys": keys}
    response = server.post("/v1/completions", {"model": "m", "prompt": "a", **bad})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "extra_keys"
    assert len(response.text) < 1000


def test_01_06_other_endpoints_refuse_bad_values_too(server: Server) -> None:
    conversation = [{"role": "user", "content": "a"}]
    for endpoint, body in (
        ("/v1/chat/completions/batch", {"messages": [conversation], "extra_keys": 5}),
        (
            "/v1/messages",
            {
                "messages": conversation,
                "max_tokens": 2,
                "vllm_xargs": {"segreuse_policy": "fastest"},
            },
        ),
        (
            "/inference/v1/generate",
            {
                "token_ids": [1, 2, 3],
                "sampling_params": {"max_tokens": 2, "extra_args": {"extra_keys": 5}},
            },
        ),
    ):
        response = server.post(endpoint, {"model": "m", **body})
        assert response.status_code == 400, (endpoint, response.text)
        assert "extra_keys" in response.text or "segreuse_policy" in response.text


PARSES_ITSELF = {"/invocations", "/scale_elastic_ep", "/inference/v1/abort_requests"}
"""Routes of vLLM's that read a body which their description does not mention."""


def post_routes(server: Server) -> dict[str, bool]:
    """Every POST route, the administrator's included, and whether it reads a body."""
    stock = server.get("/openapi.json").json()["paths"]
    ours = server.get(f"{SWITCH}/openapi.json", headers=ADMIN).json()["paths"]
    found = {
        path: "requestBody" in methods["post"] or path in PARSES_ITSELF
        for path, methods in stock.items()
        if "post" in methods
    }
    return found | {f"{SWITCH}{path}": True for path, methods in ours.items() if "post" in methods}


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", None])
def test_32_deep_bodies_are_400_on_every_route_that_reads_one(
    server: Server, content_type: str | None
) -> None:
    routes = post_routes(server)
    assert {path for path, reads in routes.items() if reads} >= {*ENDPOINTS, *PARSES_ITSELF}
    headers = {"Content-Type": content_type} if content_type else {}
    for path, reads in routes.items():
        for name, content in deep_bodies().items():
            sent = headers | (ADMIN if path.startswith(SWITCH) else {})
            answer = server.request("POST", path, content=content, headers=sent)
            case = (path, name, answer.text[:300])
            assert answer.status_code == 400 or not reads, case
            assert answer.status_code < 500, case
    refused = server.request("POST", f"{SWITCH}/enable", content=content, headers=headers)
    assert refused.status_code == 401


# Metrics.


def metric(server: Server, name: str, **labels: str) -> float:
    """Sum of a metric's samples that carry `labels`."""
    total = 0.0
    for line in server.get("/metrics").text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.split("{")[0] == name and all(f'{k}="{v}"' in sample for k, v in labels.items()):
            total += float(value)
    return total


def test_metrics_count_what_the_report_says(server: Server) -> None:
    kinds = ("prefix", "reused", "recomputed", "exact", "new")
    tokens = "vllm:segreuse_tokens_total"
    before = {kind: metric(server, tokens, kind=kind) for kind in kinds}
    requests = metric(server, "vllm:segreuse_requests_total", outcome="reused")
    matches = metric(server, "vllm:segreuse_match_seconds_count")
    answer = server.post("/v1/completions", completion(shuffled())).raise_for_status().json()
    report = Whole(answer["kv_transfer_params"]["segreuse"])
    for kind in kinds:
        assert metric(server, tokens, kind=kind) - before[kind] == report[f"{kind}_tokens"]
    assert metric(server, "vllm:segreuse_requests_total", outcome="reused") == requests + 1
    assert metric(server, "vllm:segreuse_match_seconds_count") > matches
    assert metric(server, "vllm:segreuse_align_seconds_count") > 0
    assert metric(server, "vllm:segreuse_sparse_pass_seconds_count") > 0


def test_bypassed_requests_are_counted_with_their_reason(server: Server) -> None:
    answer = server.post("/v1/completions", completion("Hi.")).raise_for_status().json()
    reason = answer["kv_transfer_params"]["segreuse"]["bypass_reason"]
    name = "vllm:segreuse_requests_total"
    before = metric(server, name, outcome="bypassed", reason=reason)
    server.post("/v1/completions", completion("Hi.")).raise_for_status()
    assert metric(server, name, outcome="bypassed", reason=reason) == before + 1


# Kill switch.


def test_kill_switch(server: Server) -> None:
    def reused() -> int:
        answer = server.post("/v1/completions", completion(shuffled())).raise_for_status().json()
        return int(answer["kv_transfer_params"]["segreuse"]["reused_tokens"])

    assert reused() > 0
    response = server.post(f"{SWITCH}/disable", headers=ADMIN)
    assert (response.status_code, response.json()) == (200, {"enabled": False})
    try:
        assert server.get(f"{SWITCH}/status", headers=ADMIN).json()["enabled"] is False
        assert reused() == 0
    finally:
        response = server.post(f"{SWITCH}/enable", headers=ADMIN)
    assert (response.status_code, response.json()) == (200, {"enabled": True})
    assert reused() > 0


def test_what_is_observed_is_answered_as_without_reuse(server: Server) -> None:
    salts = itertools.count()

    def check(**options: Any) -> None:
        prompt, salt = shuffled(), f"nobody else's {next(salts)}"
        plain = completion(prompt, cache_salt=salt, extra_keys=None, logprobs=5, max_tokens=8)
        expected = server.post("/v1/completions", plain).raise_for_status().json()
        body = completion(prompt, logprobs=5, max_tokens=8, **options)
        answer = server.post("/v1/completions", body).raise_for_status().json()
        report = Whole(answer["kv_transfer_params"]["segreuse"])
        assert (report["bypass_reason"], report["reused_tokens"]) == ("observed", 0)
        assert report["observed"]["reused_tokens"] > report["prompt_tokens"] // 2
        assert report["observed"]["computed_share"] < 1
        assert answer["choices"] == expected["choices"]

    tokens = "vllm:segreuse_observed_tokens_total"
    before = metric(server, tokens, kind="reused")
    check(vllm_xargs={"segreuse_observe": True})
    assert server.post(f"{SWITCH}/observe", headers=ADMIN).json() == {"enabled": "observe"}
    try:
        assert server.get(f"{SWITCH}/status", headers=ADMIN).json()["enabled"] == "observe"
        check()
    finally:
        server.post(f"{SWITCH}/enable", headers=ADMIN).raise_for_status()
    assert metric(server, tokens, kind="reused") > before


def test_a_prompt_is_explained_by_the_command(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(completion(shuffled())))
    assert explain_cli.main([str(file), "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert "segment, moved by " in shown
    assert " would be reused with focus" in shown
    assert "Request number" in shown, "the text of what is new is shown"
    file.write_text(json.dumps(completion(shuffled())))
    assert explain_cli.main([str(file), "--url", server.url, "--json", "--reuse"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["bypass_reason"] is None
    tokens = dict.fromkeys(("prefix", "segment", "new"), 0)
    for stretch in report["explain"]:
        tokens[stretch["source"]] += stretch["tokens"]
    assert tokens["segment"] == report["reused_tokens"] > 0
    assert tokens["new"] == report["new_tokens"]


def explained(server: Server, prompt: str, **options: Any) -> Any:
    body = completion(prompt, vllm_xargs={"segreuse_explain": True}, **options)
    answer = server.post("/v1/completions", body).raise_for_status().json()
    return Whole(answer["kv_transfer_params"]["segreuse"])


def test_the_command_names_an_edit_and_the_text_that_is_gone(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, rest = f"Edited number {next(_preambles)}. {DOCUMENTS[0][:600]}", DOCUMENTS[1][:1200]
    earlier, edited = tmp_path / "earlier.json", tmp_path / "edited.json"
    before = completion(f"{head}THOUGHT OF {DOCUMENTS[0][900:1300]}{rest}", extra_keys=["edits"])
    server.post("/v1/completions", before).raise_for_status()
    earlier.write_text(json.dumps(before))
    edited.write_text(json.dumps(completion(f"{head}{rest}", extra_keys=["edits"])))
    asked = [str(edited), "--url", server.url, "--earlier", str(earlier), "--json"]
    assert explain_cli.main(asked) == 0
    said = json.loads(capsys.readouterr().out)
    edit, texts = said["report"]["edit"], said["edit"]
    assert edit["gone_tokens"] > edit["new_tokens"]
    assert edit["found_tokens"] > said["report"]["prompt_tokens"] // 3
    assert texts["gone"].startswith("TH")
    assert head.endswith(texts["before"][-9:])


@pytest.mark.parametrize(
    ("session_id", "status"), [("s" * 10_000, 200), ("", 200), (7, 400), (["s"], 400), ({}, 400)]
)
def test_a_session_id_is_a_string_of_any_length(
    server: Server, session_id: Any, status: int
) -> None:
    options = {"vllm_xargs": {"segreuse_weigh_turns": True}, "session_id": session_id}
    for _ in range(2):
        answer = server.post("/v1/completions", completion("A turn. " * 20, **options))
        assert answer.status_code == status
        assert ("session_id" in answer.text) == (status == 400), "the error names it"


def test_a_session_id_in_options_or_a_header_is_read_by_vllm(server: Server) -> None:
    for xargs in ({"session_id": "s" * 10_000}, {"session_id": 7}):
        body = completion("A turn. " * 20, vllm_xargs={"segreuse_weigh_turns": True, **xargs})
        server.post("/v1/completions", body).raise_for_status()
    headers = {"X-Session-ID": "s" * 10_000}
    body = completion("A turn. " * 20, vllm_xargs={"segreuse_weigh_turns": True})
    server.post("/v1/completions", body, headers=headers).raise_for_status()


def test_a_namespace_of_others_is_explained_like_one_that_is_not_there(server: Server) -> None:
    others = explained(server, "".join(DOCUMENTS), extra_keys=["docs", "nobody"], cache_salt="a")
    nobody = explained(server, "".join(DOCUMENTS), extra_keys=["nobody"], cache_salt="b")
    assert others == nobody
    assert [stretch["reason"] for stretch in nobody["explain"]] == ["unknown", "last_token"]


def test_32_kill_switch_wants_its_token(server: Server) -> None:
    wrong = {"Authorization": "Bearer wrong"}
    assert server.post(f"{SWITCH}/disable").status_code == 401
    assert server.post(f"{SWITCH}/disable", headers=wrong).status_code == 403
    assert server.get(f"{SWITCH}/disable", headers=ADMIN).status_code == 405
    assert server.get(f"{SWITCH}/other", headers=ADMIN).status_code == 404
    larger = "x" * SegReuseConfig().knowledge_body_bytes
    assert server.post(f"{SWITCH}/disable", larger, headers=ADMIN).status_code == 413
    assert server.get(f"{SWITCH}/status", headers=ADMIN).json()["enabled"] is True
