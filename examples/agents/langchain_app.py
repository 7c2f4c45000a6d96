# SPDX-License-Identifier: Apache-2.0
"""The same agent with LangChain: tools that the model calls, `ChatOpenAI`, a loop.

    python -m examples.agents.langchain_app "What do 2 of the wool blanket cost?"

The server needs vLLM's flags for tools: `--enable-auto-tool-choice --tool-call-parser hermes`, or
the parser of its model. The only line about reuse is `extra_body`.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from examples.agents.run import STEPS, parse
from examples.agents.tools import CATALOGUE, SCHEMAS, Tools

SYSTEM = "You answer questions about the articles of a shop. Look up prices, and calculate."


def make_model(url: str, name: str, extra_key: str) -> Runnable[Any, Any]:
    """The server's model with the tools, reusing what is under `extra_key`."""
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model=name,
        temperature=0,
        extra_body={"extra_keys": [extra_key]},
    )
    return model.bind_tools([{"type": "function", "function": dict(it)} for it in SCHEMAS])


def converse(model: Runnable[Any, Any], question: str, tools: Tools) -> Iterator[AnyMessage]:
    """Messages behind the question, up to an answer without a call of a tool."""
    messages: list[AnyMessage] = [SystemMessage(SYSTEM), HumanMessage(question)]
    for _ in range(STEPS):
        said = model.invoke(messages)
        messages.append(said)
        yield said
        if not said.tool_calls:
            return
        for call in said.tool_calls:
            given = str(next(iter(call["args"].values()), ""))
            found = ToolMessage(tools.call(call["name"], given), tool_call_id=call["id"])
            messages.append(found)
            yield found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse("A LangChain agent with two tools.", argv)
    import openai

    try:
        served = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none").models.list().data[0].id
        model = make_model(args.url, served, args.key)
        for message in converse(model, args.question, Tools(CATALOGUE)):
            calls = getattr(message, "tool_calls", None)
            print(f"{message.type}: {calls or message.content}", flush=True)
    except openai.OpenAIError as error:
        print(f"agents example: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
