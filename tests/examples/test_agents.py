# SPDX-License-Identifier: Apache-2.0
"""The agents example: its tools, what is an action, and both programs against a server of few
lines."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import Request

from examples.agents import editing, react, run
from examples.agents.tools import CATALOGUE, SCHEMAS, ToolError, Tools, calculate
from tests.knowledge.served import served


@pytest.mark.parametrize(
    ("expression", "value"),
    [("31 * 3 + 84", 177), ("-(2 - 0.5)", -1.5), ("10 / 4", 2.5), ("10 / 5", 2), (" 1", 1)],
)
def test_arithmetic(expression: str, value: float) -> None:
    result = calculate(expression)
    assert result == value
    assert isinstance(result, int) == float(value).is_integer()


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "2 ** 999999",
        "open('x')",
        "a",
        "1 / 0",
        "True + 1",
        "1" * 201,
        "(" * 150,
        "'a'*9",
    ],
)
def test_anything_else_is_an_error(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)
    assert "error" in json.loads(Tools(CATALOGUE).call("calculator", expression))


def test_a_search_finds_the_article() -> None:
    for title in CATALOGUE:
        first, _ = json.loads(Tools(CATALOGUE).call("search", title))["results"]
        assert first["title"] == title
        told = ". ".join(line["text"] for line in first["highlights"]) + "."
        assert told == CATALOGUE[title]


def test_an_observation_differs_at_every_call_in_its_values_only() -> None:
    tools = Tools(CATALOGUE)
    first, second = (tools.call("search", "oak ladder") for _ in range(2))
    assert first != second
    for name in ("request_id", "time", "took_ms"):
        assert json.loads(first)[name] != json.loads(second)[name]
    values = r'"request_id": "[0-9a-f]{12}"|"time": "[\dT:Z-]+"|\d+(\.\d+)?'
    assert re.sub(values, "_", first) == re.sub(values, "_", second)
    assert Tools(CATALOGUE).call("search", "oak ladder") == first, "the same seed"
    assert Tools(CATALOGUE, seed=1).call("search", "oak ladder") != first


def test_an_unknown_tool_is_an_observation() -> None:
    assert "no tool 'mail'" in json.loads(Tools(CATALOGUE).call("mail", "x"))["error"]


def test_what_is_an_action_and_what_is_an_answer() -> None:
    action = ' I look.\nAction: Search\nAction Input: "oak ladder"\n\nThought: next'
    assert react.action(action) == ("search", "oak ladder")
    assert react.turn(action) == ' I look.\nAction: Search\nAction Input: "oak ladder"'
    assert react.answer(action) is None
    assert react.action(" I know the answer.\nFinal Answer: 93") is None
    assert react.answer(" I know the answer.\nFinal Answer: 93\nQuestion: and") == "93"
    assert react.answer(action + "\nFinal Answer: made up") is None, "an action comes first"
    assert react.turn(" no idea\n") == " no idea"
    assert react.turn(" none.\nObservation: made up\nAction: a\nAction Input: b") == " none."


def test_the_instructions_have_every_schema() -> None:
    for schema in SCHEMAS:
        assert json.dumps(schema) in react.instructions()


REPORT = {f"{name}_tokens": 7 for name in ("prompt", "prefix", "reused", "similar", "new")}
TEXTS = (
    " I need a price.\nAction: search\nAction Input: blue kettle\nObservation: made up",
    " I multiply.\nAction: calculator\nAction Input: 31 * 3",
    " I know the answer.\nFinal Answer: 93",
)
CALL = {"name": "calculator", "arguments": '{"expression": "31 * 3"}'}


@pytest.fixture
def asked() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of a server, and the bodies that it was sent; it says `TEXTS`, one after the other."""
    bodies: list[dict[str, Any]] = []
    base = {"id": "1", "created": 1, "model": "m", "kv_transfer_params": {"segreuse": REPORT}}
    with served() as server:

        @server.app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "m", "object": "model"}]}

        @server.app.post("/v1/completions")
        async def complete(request: Request) -> dict[str, Any]:
            bodies.append(await request.json())
            choice = {"index": 0, "text": TEXTS[len(bodies) - 1], "finish_reason": "stop"}
            return base | {"object": "text_completion", "choices": [choice]}

        @server.app.post("/v1/chat/completions")
        async def chat(request: Request) -> dict[str, Any]:
            bodies.append(await request.json())
            call = {"id": "c", "type": "function", "function": CALL}
            message = {"role": "assistant", "content": "93"}
            if len(bodies) == 1 and bodies[0].get("tool_choice") != "none":
                message = {"role": "assistant", "content": None, "tool_calls": [call]}  # type: ignore[dict-item]
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return base | {"object": "chat.completion", "choices": [choice]}

        yield server.url, bodies


def test_the_agent_calls_its_tools_until_it_answers(
    asked: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, bodies = asked
    assert run.main(["What do 3 of the blue kettle cost?", "--url", url]) == 0
    assert all(body["extra_keys"] == ["agents"] for body in bodies)
    first, second, third = (body["prompt"] for body in bodies)
    assert second.startswith(first)
    assert third.startswith(second)
    assert "The blue kettle costs 31 euros" in second
    assert '"result": 93' in third
    out = capsys.readouterr().out
    assert "Final Answer: 93" in out
    assert out.count("similar 7") == 3


def test_the_editing_agent_cuts_what_is_old_and_nothing_else(
    asked: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, bodies = asked
    assert editing.main(["--url", url, "--keep", "2"]) == 0
    assert all(body["extra_keys"] == ["agents"] for body in bodies)
    assert len(bodies) == 2 * len(CATALOGUE) == 8
    for number, body in enumerate(bodies, 1):
        results = [it["content"] for it in body["messages"] if it["role"] == "tool"]
        assert [it == editing.REMOVED for it in results] == [i < number - 2 for i in range(number)]
    last, before = bodies[7]["messages"], bodies[6]["messages"]
    same = [one == other for one, other in zip(last, before, strict=False)]
    assert same.count(False) == 1, "one result was cut"
    assert capsys.readouterr().out.count("prefix 7, reused 7") == 8


@pytest.mark.parametrize("agent", [run, editing])
def test_a_server_that_is_not_there_is_one_sentence(
    agent: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent.main(["--url", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(("agents example: ", "editing example: "))
    assert error.count("\n") == 1


@pytest.mark.slow  # LangChain takes seconds to import
def test_the_langchain_variant_calls_a_tool(
    asked: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("langchain_openai")
    from examples.agents import langchain_app

    url, bodies = asked
    assert langchain_app.main(["What do 3 of the blue kettle cost?", "--url", url]) == 0
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["search", "calculator"]
    assert all(body["extra_keys"] == ["agents"] for body in bodies)
    assert json.loads(bodies[1]["messages"][-1]["content"])["result"] == 93
    assert capsys.readouterr().out.rstrip().endswith("ai: 93")
