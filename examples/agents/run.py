# SPDX-License-Identifier: Apache-2.0
"""A ReAct agent with the `openai` client: prints what it does, and where its prompts' KV came from.

    python -m examples.agents.run "What do 3 of the blue kettle and an oak ladder cost together?"

What is about reuse is `extra_body`: all conversations of the key `agents` share what they compute.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import openai

from examples.agents import react
from examples.agents.tools import CATALOGUE, Tools

QUESTION = "What do 3 of the blue kettle and 2 of the oak ladder cost together?"
STEPS = 10


class Turn(NamedTuple):
    """One request: what the agent wrote, what the tool answered, and the report about reuse."""

    text: str
    observation: str
    report: dict[str, Any] | None


def agent(
    client: openai.OpenAI, model: str, question: str, tools: Tools, extra_key: str
) -> Iterator[Turn]:
    """Turns up to the one with the final answer, at most `STEPS`.

    The instructions and the history are one text, completed by the model: it only grows.
    """
    prompt = f"{react.instructions()}\nQuestion: {question}\nThought:"
    for _ in range(STEPS):
        found = client.completions.create(
            model=model,
            prompt=prompt,
            # Not `stop=react.STOP`: where a stop string ends an answer, vLLM sends no report.
            max_tokens=64,
            temperature=0.0,
            extra_body={"extra_keys": [extra_key]},
        )
        report = ((found.model_extra or {}).get("kv_transfer_params") or {}).get("segreuse")
        text = react.turn(found.choices[0].text)
        action = react.action(text)
        observation = "" if action is None else tools.call(*action)
        yield Turn(text, observation, report)
        if action is None:  # the final answer, or what is none
            return
        prompt += f"{text}\nObservation: {observation}\nThought:"


def shown(turn: Turn) -> str:
    """A turn as the terminal shows it."""
    report = turn.report or {}
    names = ("prompt", "prefix", "reused", "similar", "new")
    counts = ", ".join(f"{name} {report.get(f'{name}_tokens', '?')}" for name in names)
    lines = [f"Thought:{turn.text}", f"  [tokens: {counts}]"]
    return "\n".join([*lines, f"Observation: {turn.observation}"] if turn.observation else lines)


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line of both agents."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("question", nargs="?", default=QUESTION)
    options.add_argument("--url", default="http://localhost:8000", help="root of the server")
    options.add_argument("--key", default="agents", help="whose KV is shared: the extra key")
    return options.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = parse("A ReAct agent with a search and a calculator.", argv)
    try:
        client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        for turn in agent(client, model, args.question, Tools(CATALOGUE), args.key):
            print(shown(turn), flush=True)
    except openai.OpenAIError as error:
        print(f"agents example: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
