# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse explain REQUEST.json --url URL`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import httpx
from rich.console import Console

from segreuse_tools.explain import page
from segreuse_tools.explain.stretch_table import table
from vllm_segreuse.explain.asking import (
    TIMEOUT_S,
    ExplainError,
    Explanation,
    InputError,
    authorized,
    explain,
    read_file,
)

URL = "http://localhost:8000"


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status: 1 if the server gave no explanation, 2 for bad input."""
    args = _parser().parse_args(argv)
    try:
        body = read_file(args.request)
        headers = authorized(args.api_key)
        with httpx.Client(base_url=args.url, headers=headers, timeout=TIMEOUT_S) as server:
            found = explain(server, body, args.reuse)
    except (ExplainError, httpx.InvalidURL) as error:
        print(f"vllm-segreuse explain: {error}", file=sys.stderr)
        return 1 if isinstance(error, ExplainError) and not isinstance(error, InputError) else 2
    if found.no_texts:
        print(f"vllm-segreuse explain: no texts: {found.no_texts}", file=sys.stderr)
    status = _write_page(args.html, found, args.request.name) if args.html else 0
    console = Console()
    if args.json:
        said = json.dumps({"report": found.report, "texts": found.texts}, indent=1)
        try:
            print(said, flush=True)
        except BrokenPipeError:  # `head` has enough
            console.on_broken_pipe()  # ends the process, as it does for a table
    else:
        console.print(table(found))
    return status


def _write_page(file: Path, found: Explanation, name: str) -> int:
    try:
        page.write(file, found, name)
    except OSError as error:
        print(f"vllm-segreuse explain: cannot write {file}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-segreuse explain",
        description="What a running server would reuse of a request, and why not the rest. "
        "Without --reuse the server computes the whole prompt: asked again, it finds the prompt in "
        "its prefix cache.",
    )
    parser.add_argument(
        "request", type=Path, metavar="REQUEST.json", help="the body of a (chat) completion"
    )
    parser.add_argument("--url", default=URL, help=f"of the server ({URL})")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="($OPENAI_API_KEY)"
    )
    parser.add_argument(
        "--reuse", action="store_true", help="reuse what is found, instead of only observing it"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the report and the beginnings of texts instead of a table",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    return parser
