# SPDX-License-Identifier: Apache-2.0
"""An agent that edits its own context, with the `openai` client and a tool loop.

    python -m examples.agents.editing --keep 4

It looks articles up, a search each. When a search is older than the last `--keep`, its result
becomes one line, as agents do that run out of context. Each turn prints where the KV of its prompt
came from: behind an edit the prefix cache finds nothing, and segments are found where they stand
now.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import openai

from examples.agents.tools import CATALOGUE, SCHEMAS, Tools

REMOVED = "[removed: search again if you need it]"
SYSTEM = "You help the staff of a shop. Look articles up with your tools."

Message = dict[str, Any]


def edited(messages: Sequence[Message], keep: int) -> list[Message]:
    """The same conversation, with a line for each tool result but the last `keep`."""
    results = [i for i, message in enumerate(messages) if message["role"] == "tool"]
    old = set(results[: max(0, len(results) - keep)])
    return [
        {**message, "content": REMOVED} if i in old else message
        for i, message in enumerate(messages)
    ]


def conversation(titles: Sequence[str], tools: Tools) -> Iterator[list[Message]]:
    """The messages of each turn. The searches are made here, so that every model has the same
    history: what is shown is the cache, not the model."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    for number, title in enumerate(titles):
        arguments = json.dumps({"query": title})
        call = {"name": "search", "arguments": arguments}
        messages += [
            {"role": "user", "content": f"Look up the {title}."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"call{number}", "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": f"call{number}",
                "content": tools.call("search", title),
            },
        ]
        yield messages
        messages = [*messages, {"role": "assistant", "content": "I have it."}]


def shown(number: int, report: Mapping[str, Any] | None) -> str:
    """A line of the terminal."""
    if report is None:
        return f"turn {number}: no report; is the server one of `vllm-segreuse serve`?"
    names = ("prompt", "prefix", "reused", "recomputed", "new")
    counts = ", ".join(f"{name} {report.get(f'{name}_tokens', 0)}" for name in names)
    return f"turn {number}: tokens: {counts}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = argparse.ArgumentParser(description="An agent that drops its oldest results.")
    options.add_argument("--url", default="http://localhost:8000", help="root of the server")
    options.add_argument("--key", default="agents", help="whose KV is shared: the extra key")
    options.add_argument("--keep", type=int, default=4, help="results that stay (%(default)s)")
    args = options.parse_args(argv)
    try:
        client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        turns = conversation([*CATALOGUE] * 2, Tools(CATALOGUE, results=4))
        for number, messages in enumerate(turns, 1):
            answer = client.chat.completions.create(
                model=model,
                messages=edited(messages, args.keep),
                tools=[{"type": "function", "function": it} for it in SCHEMAS],
                tool_choice="none",
                max_tokens=8,
                temperature=0.0,
                extra_body={"extra_keys": [args.key]},
            )
            told = (answer.model_extra or {}).get("kv_transfer_params") or {}
            print(shown(number, told.get("segreuse")), flush=True)
    except openai.OpenAIError as error:
        print(f"editing example: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
