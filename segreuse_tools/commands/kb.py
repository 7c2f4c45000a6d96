# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse kb ...`: the knowledge bases of a running server, from the command line.

Exit codes: 0 all done; 1 the server refused something, or a file could not be read; 2 the command
line is wrong; 3 there is no such server.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from segreuse_tools.command_line import chosen_command, number
from segreuse_tools.knowledge import TOKEN_ENV, URL_ENV
from segreuse_tools.knowledge.extract import Limits
from vllm_segreuse.features.knowledge.schemas import Context, Scorer

LOCAL = "http://localhost:8000"

LIMITS = Limits()
MOST = 2**40
"""Bytes that a limit may be; more is what a file cannot have."""


def main(arguments: Sequence[str]) -> int:
    """Run `vllm-segreuse kb`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-segreuse kb",
        description="Knowledge bases: documents that are computed once, and whose KV stays in GPU "
        "memory.",
    )
    summaries = {name: it.description.partition("\n")[0] for name, it in COMMANDS.items()}
    name = chosen_command(parser, summaries, arguments)
    parser = _parser(name)
    # Options may stand between the ids and files, of which there may be any number.
    given = parser.parse_intermixed_args(arguments[1:])
    if given.token is None:
        parser.error(
            f"Missing option '--token': give the server's admin token, or set {TOKEN_ENV} to it"
        )
    # Imported here: it needs the libraries of the extra `kb`, and the help does not.
    from segreuse_tools.knowledge.actions import run

    return run(name, given, parser.error)


class _Command(NamedTuple):
    """A command below `kb`: what it says of itself, and its own arguments."""

    description: str
    declare: Callable[[argparse.ArgumentParser], None]


def _parser(name: str) -> argparse.ArgumentParser:
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"vllm-segreuse kb {name}",
        description=inspect.cleandoc(command.description),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.declare(parser)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        default=os.environ.get(URL_ENV) or LOCAL,
        help=f"root of the server (${URL_ENV}, or {LOCAL})",
    )
    server.add_argument(
        "--token",
        default=os.environ.get(TOKEN_ENV) or None,
        help=f"admin token of the server (${TOKEN_ENV})",
    )
    return parser


def _create(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument(
        "--extra-key", metavar="KEY", help="requests that name it reuse the base (the name)"
    )
    parser.add_argument(
        "--preamble", metavar="TEXT", help="text before every document while it is computed"
    )
    parser.add_argument(
        "--context",
        choices=get_args(Context),
        help="compute documents behind the beginnings of two others of the base, or alone "
        "(siblings)",
    )
    _json(parser)


def _add(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="files, or folders with all below them",
    )
    _wait(parser, "until everything is computed, or only until it is stored")
    parser.add_argument(
        "--max-bytes",
        type=number(int, 1, MOST),
        default=LIMITS.max_bytes,
        metavar="N",
        help="largest file, and most text in one (%(default)s)",
    )
    parser.add_argument(
        "--max-pages",
        type=number(int, 1),
        default=LIMITS.max_pages,
        metavar="N",
        help="most pages of a PDF (%(default)s)",
    )
    parser.add_argument(
        "--max-seconds",
        type=number(float, 0.01, 86400),
        default=LIMITS.max_seconds,
        metavar="S",
        help="longest time that one file may take (%(default)s)",
    )
    parser.add_argument(
        "--max-memory",
        type=number(int, 2**20, MOST),
        default=LIMITS.max_memory_bytes,
        metavar="N",
        help="most bytes of memory that parsing a file may take (%(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=number(float, 0, 1),
        metavar="SHARE",
        help="keep the KV of this share of the tokens; requests then name the documents (all, "
        "found by their text)",
    )
    parser.add_argument(
        "--scorer", choices=get_args(Scorer), help="what says which tokens are kept (attention)"
    )
    _json(parser)


def _ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="list the documents of this base")
    _json(parser)


def _show(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    parser.add_argument("document", metavar="DOCUMENT", help="id of the document")
    _json(parser)


def _rm(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    _ids(parser)
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _warm(parser: argparse.ArgumentParser) -> None:
    _name(parser)
    _ids(parser)
    _wait(parser, "until everything is computed, or only until it is asked for")
    _json(parser)


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the knowledge base")


def _ids(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="*", metavar="ID", help="ids of documents")


def _wait(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--wait", action=argparse.BooleanOptionalAction, default=True, help=help)


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="JSON on the standard output, for scripts"
    )


COMMANDS = {
    "create": _Command(
        "Make an empty knowledge base. Does nothing if the same one is there.", _create
    ),
    "add": _Command(
        """Add or update documents: .txt, .md, .jsonl, .html and .pdf.

        A document's id is its path below the folder: adding a folder again updates it.

        A .jsonl file holds one document per line: {"text": ..., "id": ..., "metadata": {...}}.

        Links out of a folder, special files, and files above a limit are left out, with a sentence.
        """,
        _add,
    ),
    "ls": _Command("List the knowledge bases, or the documents of one.", _ls),
    "show": _Command(
        "Print the text of a document, as it was made of the file: requests must contain it.", _show
    ),
    "rm": _Command("Remove documents, or without any ID the whole base.", _rm),
    "warm": _Command(
        "Compute documents that are cold, all of the base or those with an ID.", _warm
    ),
    "stats": _Command(
        "Show how much of the GPU's KV cache the knowledge bases hold, and how often it was used.",
        _json,
    ),
}
"""By name; `knowledge/actions.py` does what they say."""
