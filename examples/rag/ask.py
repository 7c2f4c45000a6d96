# SPDX-License-Identifier: Apache-2.0
"""Asks questions over a knowledge base with the `openai` client, with reuse and without.

    python -m examples.rag.ask [--folder DIR] [--questions FILE] [--url URL]

Fills the base first (nothing to do the second time). Every question is asked twice, in prompts with
the same passages in different orders, and prints the time to the first token of both.
"""

import argparse
import os
import random
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import openai
from rich.console import Console
from rich.progress import track
from rich.table import Table

from examples.rag import library
from examples.rag.chat import Answer, ask
from segreuse_tools.knowledge.client import TOKEN_ENV, ClientError, KnowledgeClient
from segreuse_tools.knowledge.extract import ExtractError
from vllm_segreuse import NewDocument


class Asked(NamedTuple):
    """One question, asked without and with extra keys."""

    question: str
    plain: Answer
    reused: Answer


def fill(client: KnowledgeClient, name: str, documents: Mapping[str, str]) -> None:
    """Creates the base and adds the documents; returns when their KV is in GPU memory."""
    client.create(name)
    new = (NewDocument(id=id_, text=text) for id_, text in documents.items())
    added = client.add(name, new, wait=True)
    failed = [document for document in added if document.status == "failed"]
    if failed:
        raise ClientError(f"{len(failed)} documents failed; {failed[0].id}: {failed[0].error}")


def ask_both_ways(
    client: openai.OpenAI,
    model: str,
    name: str,
    found: library.Library,
    questions: list[str],
    count: int,
    max_tokens: int,
) -> Iterator[Asked]:
    """Asks every question in two prompts, each with the passages in an order of its own."""
    shuffle = random.Random(0)
    for number, question in enumerate(questions):
        answers: dict[bool, Answer] = {}
        # Taking turns at going first, so that neither way profits from a warm machine.
        for reuse in (number % 2 == 1, number % 2 == 0):
            passages = found.search(question, count)
            shuffle.shuffle(passages)
            answers[reuse] = ask(
                client,
                model,
                library.messages(passages, question),
                max_tokens=max_tokens,
                extra_body={"extra_keys": [name]} if reuse else None,
            )
        yield Asked(question, answers[False], answers[True])


def show(console: Console, asked: list[Asked]) -> None:
    """One line per question, and the median."""
    table = Table("question", "prompt tokens", "reused", "TTFT without", "TTFT with", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in asked:
        table.add_row(
            row.question,
            f"{row.reused.prompt_tokens}",
            f"{(row.reused.report or {}).get('reused_tokens', 0)}",
            f"{row.plain.ttft_s * 1e3:.0f} ms",
            f"{row.reused.ttft_s * 1e3:.0f} ms",
            f"{row.reused.ttft_s / row.plain.ttft_s:.2f}",
        )
    console.print(table)
    ratio = statistics.median(row.reused.ttft_s / row.plain.ttft_s for row in asked)
    console.print(f"median ratio of the times to the first token: {ratio:.2f}")


def parser(description: str) -> argparse.ArgumentParser:
    """Options that both variants of the example take."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--url", default="http://localhost:8000", help="root of the server")
    options.add_argument("--token", default=os.environ.get(TOKEN_ENV, ""), help=f"or {TOKEN_ENV}")
    options.add_argument("--base", default="python-topics", help="name of the knowledge base")
    options.add_argument("--folder", type=Path, help="your documents, instead of Python's topics")
    options.add_argument("--questions", type=Path, default=library.QUESTIONS, help="one per line")
    options.add_argument("--passages", type=int, default=8, help="in each prompt")
    options.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    return options


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    args = parser("Questions over a knowledge base, with reuse and without.").parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    try:
        documents = library.folder(args.folder) if args.folder else library.python_topics()
        with KnowledgeClient(args.url, args.token) as bases:
            console.print(f"Filling {args.base} with {len(documents)} documents ...")
            fill(bases, args.base, documents)
            client = openai.OpenAI(base_url=f"{bases.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        questions = library.questions(args.questions)
        asking = ask_both_ways(
            client,
            model,
            args.base,
            library.Library(documents),
            questions,
            args.passages,
            args.max_tokens,
        )
        progress = Console(stderr=True)
        show(console, list(track(asking, "asking", len(questions), console=progress)))
    except (ClientError, ExtractError, OSError, ValueError, openai.OpenAIError) as error:
        print(f"rag example: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
