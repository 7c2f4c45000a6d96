# SPDX-License-Identifier: Apache-2.0
"""The example for models trained on documents computed alone, against a server of few lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from examples import documents
from tests.knowledge.served import served


def _chunks() -> Iterator[str]:
    base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": 0, "delta": {"content": "Two."}, "finish_reason": None}
    yield f"data: {json.dumps(base | {'choices': [choice]})}\n\n"
    last: dict[str, Any] = base | {"choices": []}
    last["usage"] = {"prompt_tokens": 50, "completion_tokens": 1, "total_tokens": 51}
    last["kv_transfer_params"] = {"segreuse": {"policy": "link", "reused_tokens": 40}}
    yield f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"


@pytest.fixture
def asked() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of a server that refuses documents without text, and what it was sent."""
    bodies: list[dict[str, Any]] = []
    with served() as server:

        @server.app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "m", "object": "model"}]}

        @server.app.post("/v1/chat/completions")
        async def complete(request: Request) -> Any:
            bodies.append(await request.json())
            if not all(document["text"] for document in bodies[-1]["documents"]):
                error = {"message": "documents[0] has no text", "param": "documents"}
                return JSONResponse({"error": error}, status_code=400)
            return StreamingResponse(_chunks(), media_type="text/event-stream")

        yield server.url, bodies


def files(folder: Path, *texts: str) -> list[str]:
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def test_each_file_is_a_document(
    asked: tuple[str, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, bodies = asked
    question = ["How many?", *files(tmp_path, "one", "two"), "--url", url]
    assert documents.main(question) == 0
    assert documents.main([*question, "--extra-key", "mine"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Two.\nTwo.\n"
    assert "40 of 50 prompt tokens reused" in printed.err
    assert [body["documents"] for body in bodies] == [[{"text": "one"}, {"text": "two"}]] * 2
    assert [body.get("extra_keys") for body in bodies] == [None, ["mine"]]


def test_what_the_server_refuses_is_one_sentence(
    asked: tuple[str, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = asked
    assert documents.main(["How many?", *files(tmp_path, ""), "--url", url]) == 1
    assert "documents[0] has no text" in capsys.readouterr().err
    assert documents.main(["How many?", str(tmp_path / "none.txt"), "--url", url]) == 1
    assert "none.txt" in capsys.readouterr().err
