# SPDX-License-Identifier: Apache-2.0
"""A workload of segments as JSONL, for `vllm bench serve` and guidellm (docs/recipes.md).

    python -m examples.workload > workload.jsonl
    python -m examples.workload --folder docs/ --requests 500 --documents 6 > workload.jsonl

Each request has a few documents in an order of its own, behind a line and before a question that
nobody else has: a prefix cache finds nothing, and every document but its first occurrence is a
segment. Popular documents are asked for more often (Zipf's law). Without `--folder` the documents
are the documentation topics that ship with Python.

Columns: `prompt`; `output_tokens` (read by vLLM) and `output_tokens_count` (the same, by guidellm).
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: prints the workload."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.workload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, help="text files; default: Python's own topics")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--documents", type=int, default=4, help="of each request")
    parser.add_argument("--of", type=int, default=24, help="documents there are")
    parser.add_argument("--characters", type=int, default=4000, help="of each document, at most")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    texts = _texts(args.folder, args.of, args.characters)
    if len(texts) < args.documents:
        parser.error(f"{len(texts)} documents are too few for {args.documents} in a request")
    for prompt in prompts(texts, args.requests, args.documents, args.seed):
        print(json.dumps(row(prompt, args.output_tokens)))


def prompts(texts: Sequence[str], requests: int, documents: int, seed: int) -> Iterator[str]:
    """Prompts; the same for the same seed.

    Args:
        texts: of the documents, the most popular first.
        requests: how many prompts.
        documents: how many in each.
        seed: of what is drawn.
    """
    draw = random.Random(seed)
    for number in range(requests):
        # Weighted, without replacement (Efraimidis and Spirakis, 2006).
        keys = [draw.random() ** rank for rank in range(1, len(texts) + 1)]
        chosen = sorted(range(len(texts)), key=lambda it: keys[it])[-documents:]
        draw.shuffle(chosen)
        parts = [f"Request {number} of {seed}.", *(texts[it] for it in chosen)]
        yield "\n\n".join([*parts, f"Which of these {documents} texts is about {number}?"])


def row(prompt: str, output_tokens: int) -> dict[str, Any]:
    """A line of the file."""
    return {
        "prompt": prompt,
        "output_tokens": output_tokens,
        "output_tokens_count": output_tokens,
    }


def _texts(folder: Path | None, number: int, characters: int) -> list[str]:
    if folder is None:
        from pydoc_data.topics import topics

        texts = [text for _, text in sorted(topics.items()) if len(text) >= characters]
    else:
        texts = [file.read_text() for file in sorted(folder.rglob("*")) if file.is_file()]
    return [text[:characters] for text in texts[:number]]


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(1)
