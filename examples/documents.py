# SPDX-License-Identifier: Apache-2.0
"""Asks a model that was trained on documents computed alone about text files, by the `openai`
client (docs/trained-models.md).

    python -m examples.documents "Which rooms have a projector?" rooms.txt equipment.txt
    python -m examples.documents --extra-key handbook "How many days of leave?" leave.txt

Each file is a document. The server's chat template lays them out, and each is computed by itself
the first time that it is sent with an extra key; in any later request with that key, in any order,
it is reused. Without a key nothing stays for other requests.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import openai

from examples.rag.chat import Answer, EmptyStreamError, ask


def ask_about(
    client: openai.OpenAI,
    model: str,
    question: str,
    texts: list[str],
    extra_key: str | None,
    max_tokens: int,
) -> Answer:
    """One question about these texts.

    Args:
        model: its name at the server.
        extra_key: names who shares the documents; None: nobody does.
        max_tokens: of the answer.
    """
    body: dict[str, Any] = {"documents": [{"text": text} for text in texts]}
    if extra_key is not None:
        body["extra_keys"] = [extra_key]
    messages = [{"role": "user", "content": question}]
    return ask(client, model, messages, max_tokens=max_tokens, extra_body=body)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = argparse.ArgumentParser(description="Ask one question about text files.")
    options.add_argument("question")
    options.add_argument("files", nargs="+", type=Path, help="each is a document")
    options.add_argument("--url", default="http://localhost:8000", help="root of the server")
    options.add_argument("--extra-key", help="requests with the same one share documents")
    options.add_argument("--max-tokens", type=int, default=128, help="of the answer")
    args = options.parse_args(argv)
    try:
        texts = [file.read_text(encoding="utf-8") for file in args.files]
        client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        answer = ask_about(client, model, args.question, texts, args.extra_key, args.max_tokens)
    except (OSError, ValueError, EmptyStreamError, openai.OpenAIError) as error:
        print(f"documents example: {error}", file=sys.stderr)
        return 1
    print(answer.text)
    reused = (answer.report or {}).get("reused_tokens", 0)
    print(
        f"{reused} of {answer.prompt_tokens} prompt tokens reused, first token after "
        f"{answer.ttft_s * 1e3:.0f} ms",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
