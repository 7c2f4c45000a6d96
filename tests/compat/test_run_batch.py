# SPDX-License-Identifier: Apache-2.0
"""Lines of a batch file mean what the same bodies mean to a server."""

import asyncio
import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.entrypoints.launchers.run_batch as vllms
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from vllm_segreuse.compat.run_batch import Lines, install_in
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.parsing import parse_request
from vllm_segreuse.serve.batch_files import check_line, read_line

LINES = Lines(read_line, check_line)

CHAT = "/v1/chat/completions"


class Serving:
    """Serves chat completions: remembers what it was asked, and answers with a report."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace())
        self.asked: list[Any] = []

    async def create_chat_completion(self, request: Any) -> ChatCompletionResponse:
        self.asked.append(request)
        return ChatCompletionResponse(
            model="m", choices=[], usage={}, kv_transfer_params={"segreuse": {"reused_tokens": 7}}
        )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A patched copy of vLLM's module."""
    names = ("BatchRequestInput", "run_request", "handle_endpoint_request")
    copy = SimpleNamespace(
        __name__=vllms.__name__, **{name: getattr(vllms, name) for name in names}
    )
    install_in(copy, LINES)  # type: ignore[arg-type]
    install_in(copy, LINES)  # type: ignore[arg-type]
    return copy


def run(runner: Any, serve: Any, request: Any) -> Any:
    """Run a request; vLLM 0.32 counts it in a tracker."""
    counts = "tracker" in inspect.signature(vllms.run_request).parameters
    trackers = [vllms.BatchProgressTracker()] if counts else []
    return asyncio.run(runner.run_request(serve, request, *trackers))


def answer(runner: Any, serving: Serving, body: Any, url: str = CHAT) -> Any:
    """What the runner writes for a line."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **body}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": url, "body": body})
    request = runner.BatchRequestInput.model_validate_json(line)
    return run(runner, serving.create_chat_completion, request)


@pytest.mark.parametrize(
    "body",
    [
        {"extra_keys": "b"},
        {"extra_keys": ["b"]},
        {"vllm_xargs": {"extra_keys": "b"}},
        {"extra_keys": "b", "vllm_xargs": {"segreuse_max_drift": None}},
    ],
)
def test_keys_reach_the_request_and_the_report_the_file(runner: Any, body: Any) -> None:
    serving = Serving()
    written = answer(runner, serving, body)
    assert (written.response.status_code, written.error) == (200, None)
    assert written.response.body.kv_transfer_params == {"segreuse": {"reused_tokens": 7}}
    [request] = serving.asked
    assert parse_request(request.vllm_xargs, SegReuseConfig()).extra_keys == ("b",)
    assert "extra_keys" not in (request.model_extra or {})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"extra_keys": 5}, "extra_keys"),
        ({"extra_keys": ["a"] * 99}, "extra_keys"),
        ({"extra_keys": "a", "vllm_xargs": {"extra_keys": "a"}}, "extra_keys"),
        ({"vllm_xargs": {"extra_keys": [[]]}}, "extra_keys"),
        ({"segreuse_policy": "shift", "vllm_xargs": {"extra_keys": "a"}}, "segreuse_policy"),
        ({"vllm_xargs": {"segreuse_policy": "fast"}}, "segreuse_policy"),
        ({"extra_keys": "a", "documents": [{"base": "b", "id": "i"}]}, "segreuse_documents"),
        ({"extra_keys": "a", "vllm_xargs": {"segreuse_documents": ["b/i"]}}, "segreuse_documents"),
    ],
)
def test_what_a_server_answers_400_is_400_of_its_line(runner: Any, body: Any, param: str) -> None:
    serving = Serving()
    written = answer(runner, serving, body)
    assert (written.custom_id, written.response.status_code) == ("1", 400)
    assert written.error.error.param == param
    assert param in written.error.error.message
    assert serving.asked == []


@pytest.mark.parametrize(
    ("url", "body", "says"),
    [
        ("/v1/embeddings", {"input": "x"}, "its requests reuse nothing"),
        ("/v1/score", {"queries": "x", "documents": ["y"]}, "its requests reuse nothing"),
        ("/somewhere/rerank", {"query": "x", "documents": ["y"]}, "its requests reuse nothing"),
        ("/v1/audio/transcriptions", {"file_url": "data:,"}, "put them into vllm_xargs"),
    ],
)
@pytest.mark.parametrize("key", ["extra_keys", "segreuse_policy"])
def test_lines_that_would_ignore_our_keys_are_refused(
    url: str, body: Any, says: str, key: str, runner: Any
) -> None:
    async def serve(request: Any) -> Any:
        raise AssertionError("it must not run")

    line = {"custom_id": "1", "method": "POST", "url": url, "body": {**body, key: "a"}}
    request = runner.BatchRequestInput.model_validate_json(json.dumps(line))
    written = run(runner, serve, request)
    assert written.response.status_code == 400
    assert written.error.error.message.startswith(f"{key} has no effect at the top level")
    assert says in written.error.error.message


def test_lines_without_our_keys_are_vllms(runner: Any) -> None:
    serving = Serving()
    assert answer(runner, serving, {"other": 1}).response.status_code == 200
    assert serving.asked[0].vllm_xargs is None
    line = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}
    read = runner.BatchRequestInput.model_validate_json(json.dumps(line))
    assert read.body.input == "x"
    for bad in ("{", "[1]", "[" * 10**5):
        with pytest.raises(ValueError, match="validation error"):
            runner.BatchRequestInput.model_validate_json(bad)


def test_another_vllm_without_these_requests_is_refused() -> None:
    with pytest.raises(RuntimeError, match="BatchRequestInput"):
        install_in(SimpleNamespace(__name__="vllm"), LINES)  # type: ignore[arg-type]
