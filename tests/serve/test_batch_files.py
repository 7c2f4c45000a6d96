# SPDX-License-Identifier: Apache-2.0
"""A line of a batch file is admitted, refused, or none of ours; what vLLM reads says which."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_segreuse.serve.batch_files import BatchLine, check_line, read_line
from vllm_segreuse.serve.requests import BadOptionError

CHAT = "/v1/chat/completions"
ORDINARY = SimpleNamespace(hf_config=SimpleNamespace())


def line(body: Any, url: Any = CHAT) -> str:
    return json.dumps({"custom_id": "1", "url": url, "body": body})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[" * 100_000, "null", "[]", "5", "{}", line(None), line([1]), line("text"),
        line({"extra_keys": 5}, None), line({"extra_keys": 5}, 7), json.dumps({"url": CHAT}),
        json.dumps({"body": {"extra_keys": 5}}), line({"input": "x"}, "/v1/embeddings"),
    ],
)  # fmt: skip
def test_what_is_none_of_ours_is_left_as_it_is(text: str) -> None:
    assert read_line(text) == BatchLine(text, None, None)
    check_line(read_line(text), ORDINARY)
    check_line(read_line(text), None)


def test_what_is_admitted_is_written_as_vllm_reads_it() -> None:
    given = {"prompt": "x", "extra_keys": "a", "vllm_xargs": {"segreuse_policy": "shift"}}
    read = read_line(line(given))
    body = {"prompt": "x", "vllm_xargs": {"extra_keys": ["a"], "segreuse_policy": "shift"}}
    assert json.loads(read.text) == {"custom_id": "1", "url": CHAT, "body": body}
    assert (read.body, read.refusal) == (body, None)
    check_line(read, ORDINARY)
    check_line(read, None)


@pytest.mark.parametrize(
    ("body", "url", "left", "named"),
    [
        (
            {"n": 1, "extra_keys": 5, "vllm_xargs": {"a": 1}, "documents": [{"text": "x"}]},
            CHAT,
            {"n": 1},
            "extra_keys",
        ),
        (
            {"n": 1, "extra_keys": "a", "segreuse_policy": "fast"},
            CHAT,
            {"n": 1},
            "segreuse_policy",
        ),
        (
            {"n": 1, "extra_keys": "a", "documents": [{"base": "b", "id": "i"}]},
            CHAT,
            {"n": 1},
            "segreuse_documents",
        ),
        (
            {"n": 1, "extra_keys": "a", "documents": [{"base": "b", "id": "i", "text": "x"}]},
            CHAT,
            {"n": 1},
            "segreuse_documents",
        ),
        (
            {"n": 1, "extra_keys": "a", "documents": [{"base": "b", "id": 5}]},
            CHAT,
            {"n": 1},
            "segreuse_documents",
        ),
        (
            {"query": "x", "segreuse_policy": "shift", "documents": ["y"], "vllm_xargs": {"a": 1}},
            "/v1/rerank",
            {"query": "x", "documents": ["y"], "vllm_xargs": {"a": 1}},
            "segreuse_policy",
        ),
    ],
)
def test_what_is_refused_is_read_without_it(body: Any, url: str, left: Any, named: str) -> None:
    read = read_line(line(body, url))
    assert read.body == json.loads(read.text)["body"] == left
    assert read.refusal is not None
    assert read.refusal.option == named
    for model in (ORDINARY, None):
        with pytest.raises(BadOptionError, match=named) as caught:
            check_line(read, model)
        assert caught.value.parameter == named


def test_a_line_says_what_to_do_with_keys_that_its_endpoint_ignores() -> None:
    said = {
        url: read_line(line({"extra_keys": "a"}, url)).refusal
        for url in ("/v1/score", "/v1/audio/x")
    }
    assert {url: str(refusal) for url, refusal in said.items()} == {
        "/v1/score": "extra_keys has no effect at the top level of a body for v1 score: its "
        "requests reuse nothing",
        "/v1/audio/x": "extra_keys has no effect at the top level of a body for v1 audio x: put "
        "them into vllm_xargs",
    }


def test_documents_of_a_model_with_a_layout_are_checked() -> None:
    said = {"document_start": "<s>", "document_end": "</s>"}
    read = read_line(line({"messages": [], "documents": [{}], "extra_keys": "a"}))
    assert read.refusal is None
    check_line(read, ORDINARY)
    check_line(read, None)
    model = SimpleNamespace(hf_config=SimpleNamespace(segreuse=said))
    with pytest.raises(ValueError, match="documents"):
        check_line(read, model)
