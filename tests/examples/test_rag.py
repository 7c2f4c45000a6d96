# SPDX-License-Identifier: Apache-2.0
"""The RAG example: passages, retrieval, and both programs against an OpenAI server of few lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse
from hypothesis import given
from hypothesis import strategies as st

from examples.rag import ask, library
from segreuse_tools.knowledge.client import TOKEN_ENV
from tests.knowledge.served import TOKEN, Served, served

PARAGRAPHS = st.lists(st.sampled_from(["a", "bb bb", "ccc\nccc", "d" * 40, ""]), max_size=12)


@given(PARAGRAPHS, st.sampled_from(["\n\n", "\n \n", "\n\n\n"]), st.integers(1, 60))
def test_passages_are_slices_that_leave_out_only_space(
    paragraphs: list[str], gap: str, limit: int
) -> None:
    text = gap.join(paragraphs)
    at = 0
    for passage in library.split(text, limit):
        found = text.index(passage, at)
        assert text[at:found].strip() == ""
        at = found + len(passage)
        assert len(passage) <= limit or "\n\n" not in passage.strip()
    assert text[at:].strip() == ""


def test_short_paragraphs_share_a_passage() -> None:
    assert library.split("a\n\nb\n\nc", 4) == ["a\n\nb", "c"]


def test_the_best_passage_comes_first_and_none_twice() -> None:
    found = library.Library(
        {"x": "cats purr\n\ndogs bark", "y": "dogs bark", "z": "fish swim in the sea"},
        max_characters=10,
    )
    assert [passage.text for passage in found.passages].count("dogs bark") == 1
    assert found.search("Which animals purr?", 1) == [library.Passage("x", "cats purr")]
    assert len(found.search("sea", 99)) == len(found.passages)


def test_the_questions_find_passages_of_the_topics() -> None:
    questions = library.questions()
    assert len(questions) == len(set(questions)) == 50
    found = library.Library(library.python_topics())
    sources = {found.search(question, 1)[0].document for question in questions}
    assert len(sources) > 20, "the questions are about many topics"


def test_a_folder_is_read_as_the_command_reads_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("alpha")
    (tmp_path / "b.jsonl").write_text('{"text": "beta"}')
    assert library.folder(tmp_path) == {"b.jsonl#1": "beta", "sub/a.md": "alpha"}


def _chunks(body: dict[str, Any]) -> Iterator[str]:
    base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    for delta in (
        {"role": "assistant", "content": ""},
        {"content": "Because "},
        {"content": "so."},
    ):
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        yield f"data: {json.dumps(base | {'choices': [choice]})}\n\n"
    last: dict[str, Any] = base | {"choices": []}
    last["usage"] = {"prompt_tokens": 900, "completion_tokens": 2, "total_tokens": 902}
    if "extra_keys" in body:
        last["kv_transfer_params"] = {"segreuse": {"policy": "sparsex", "reused_tokens": 800}}
    yield f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"


@pytest.fixture
def asked() -> Iterator[tuple[str, list[dict[str, Any]], Served]]:
    """URL of a server, the bodies of the chat completions that it was sent, and the server."""
    bodies: list[dict[str, Any]] = []
    with served() as server:

        @server.app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "m", "object": "model"}]}

        @server.app.post("/v1/chat/completions")
        async def complete(request: Request) -> StreamingResponse:
            bodies.append(await request.json())
            return StreamingResponse(_chunks(bodies[-1]), media_type="text/event-stream")

        yield server.url, bodies, server


def test_each_question_is_asked_both_ways(
    asked: tuple[str, list[dict[str, Any]], Served],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, bodies, server = asked
    questions = tmp_path / "questions.txt"
    questions.write_text("What does the except* clause match?\n\nWhat is a slice?\n")
    assert ask.main(["--url", url, "--token", TOKEN, "--questions", str(questions)]) == 0
    distinct = set(library.python_topics().values())
    assert len(server.engine.pool.warm()) == len(distinct), "equal texts are stored once"
    assert [body.get("extra_keys") for body in bodies] == [
        None, ["python-topics"], ["python-topics"], None,
    ]  # fmt: skip
    plain, reused = (body["messages"][1]["content"] for body in bodies[:2])
    assert plain != reused
    assert sorted(plain) == sorted(reused), "the same passages in another order"
    out = capsys.readouterr().out
    assert "median ratio" in out
    assert "800" in out


def test_a_failure_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ask.main(["--folder", str(tmp_path), "--token", TOKEN]) == 1
    assert capsys.readouterr().err.startswith(f"rag example: {tmp_path} holds no .txt/")


def test_a_missing_token_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    assert ask.main([]) == 1
    assert capsys.readouterr().err == (
        "rag example: the admin token is empty: pass the server's, or set "
        "VLLM_SEGREUSE_ADMIN_TOKEN to it\n"
    )


@pytest.mark.slow  # LangChain takes seconds to import
def test_the_langchain_variant_streams_an_answer(
    asked: tuple[str, list[dict[str, Any]], Served], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("langchain_openai")
    from examples.rag import langchain_app

    url, bodies, _ = asked
    question = "What does the except* clause match?"
    assert langchain_app.main([question, "--url", url, "--token", TOKEN]) == 0
    assert capsys.readouterr().out == "Because so.\n"
    [body] = bodies
    assert body["extra_keys"] == ["python-topics"]
    found = library.Library(library.python_topics()).search(question, 8)
    assert body["messages"] == library.messages(found, question)
