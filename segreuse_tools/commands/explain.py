# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse explain REQUEST.json --url URL`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from segreuse_tools.command_line import is_one_of
from segreuse_tools.terminal import complain, print_all, printable

if TYPE_CHECKING:
    from segreuse_extras.viewer.asking import Explanation

URL = "http://localhost:8000"


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit status: 1 if the server gave no explanation, 2 for bad input."""
    args = _parser().parse_args(arguments)
    if is_one_of(args.html, [args.request, args.earlier]):
        complain("explain", f"--html {args.html} would overwrite a request: name another file")
        return 2
    # Imported here: they are of the extra `kb`, which the help does not need.
    import httpx
    from rich.console import Console

    from segreuse_extras.viewer import asking
    from segreuse_tools.explain.stretch_table import table

    try:
        url = asking.root_of(args.url)
    except ValueError as error:
        complain("explain", error)
        return 2
    try:
        body = asking.read_file(args.request)
        earlier = asking.read_file(args.earlier) if args.earlier else None
        headers = asking.authorized(args.api_key)
        with httpx.Client(base_url=url, headers=headers, timeout=asking.TIMEOUT_S) as server:
            found = asking.explain(server, body, args.reuse, earlier)
    except asking.RequestBodyError as error:
        complain("explain", error)
        return 2
    except asking.ExplainError as error:
        complain("explain", error)
        return 1
    if found.no_texts:
        complain("explain", f"no text: {found.no_texts}")
    status = _write_page(args.html, found, printable(args.request.name)) if args.html else 0
    if args.json:
        edit = {"edit": asdict(found.edit)} if found.edit else {}
        print_all(json.dumps({"report": found.report, "texts": found.texts, **edit}, indent=1))
    else:
        Console().print(table(found))
    return status


def _write_page(file: Path, found: Explanation, name: str) -> int:
    from segreuse_tools.explain import page

    try:
        page.write(file, found, name)
    except OSError as error:
        complain("explain", f"cannot write {file}: {error}")
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
    parser.add_argument(
        "--earlier",
        type=Path,
        metavar="FILE",
        help="the body of the request that this one was edited from, to show the text that is gone",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    return parser
