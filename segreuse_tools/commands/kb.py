# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse kb ...`: the knowledge bases of a running server, from the command line.

Exit codes: 0 all done; 1 the server refused something, or a file could not be read; 2 the command
line is wrong; 3 there is no such server.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from segreuse_tools.knowledge import extract, status_tables
from segreuse_tools.knowledge.client import (
    TOKEN_ENV,
    ClientError,
    KnowledgeClient,
    RefusedError,
    UnreachableError,
    batches,
)
from vllm_segreuse.knowledge.schemas import Context, NewDocument, Scorer

URL_ENV = "VLLM_SEGREUSE_URL"

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the knowledge base.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Ids of documents.")]
Url = Annotated[str, typer.Option(envvar=URL_ENV, help="Root of the server.")]
Token = Annotated[
    str, typer.Option(envvar=TOKEN_ENV, help="Admin token of the server.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="JSON on the standard output, for scripts.")]

LOCAL = "http://localhost:8000"
POLL_S = 0.5
LIMITS = extract.Limits()
MOST = 2**40
"""Bytes that a limit may be; more is what a file cannot have."""

_JSON: TypeAdapter[Any] = TypeAdapter(Any)

app = typer.Typer(
    name="vllm-segreuse kb",
    help="Knowledge bases: documents that are computed once, and whose KV stays in GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def create(
    name: Name,
    token: Token,
    extra_key: Annotated[
        str | None, typer.Option(help="Requests that name it reuse the base. [default: the name]")
    ] = None,
    preamble: Annotated[
        str | None, typer.Option(help="Text before every document while it is computed.")
    ] = None,
    context: Annotated[
        Context | None,
        typer.Option(
            help="Compute documents behind the beginnings of two others of the base, or alone. "
            "[default: siblings]"
        ),
    ] = None,
    url: Url = LOCAL,
    as_json: Json = False,
) -> None:
    """Make an empty knowledge base. Does nothing if the same one is there."""
    with _client(url, token) as client:
        base = client.create(name, extra_key=extra_key, preamble=preamble, context=context)
    if as_json:
        _print_json(base)
    else:
        _out().print(f'{name}: requests with extra_keys ["{base.extra_key}"] reuse its documents')


@app.command()
def add(
    name: Name,
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Files, or folders with all below them."),
    ],
    token: Token,
    wait: Annotated[
        bool, typer.Option(help="Until everything is computed, or only until it is stored.")
    ] = True,
    max_bytes: Annotated[
        int, typer.Option(min=1, max=MOST, help="Largest file, and most text in one.")
    ] = LIMITS.max_bytes,
    max_pages: Annotated[int, typer.Option(min=1, help="Most pages of a PDF.")] = LIMITS.max_pages,
    max_seconds: Annotated[
        float, typer.Option(min=0.01, max=86400, help="Longest time that one file may take.")
    ] = LIMITS.max_seconds,
    max_memory: Annotated[
        int,
        typer.Option(
            min=2**20, max=MOST, help="Most bytes of memory that parsing a file may take."
        ),
    ] = LIMITS.max_memory_bytes,
    keep: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Keep the KV of this share of the tokens; requests then name "
            "the documents. [default: all, found by their text]",
        ),
    ] = None,
    scorer: Annotated[
        Scorer | None, typer.Option(help="What says which tokens are kept. [default: attention]")
    ] = None,
    url: Url = LOCAL,
    as_json: Json = False,
) -> None:
    """Add or update documents: .txt, .md, .jsonl, .html and .pdf.

    A document's id is its path below the folder: adding a folder again updates it.

    A .jsonl file holds one document per line: {"text": ..., "id": ..., "metadata": {...}}.

    Links out of a folder, special files, and files above a limit are left out, with a sentence.
    """
    if keep == 0 or (scorer is not None and keep is None):
        raise typer.BadParameter(
            "--keep must be above 0 and at most 1" if keep == 0 else "--scorer needs --keep"
        )
    problems: list[str] = []
    limits = extract.Limits(max_bytes, max_pages, max_seconds, max_memory)
    with (
        _client(url, token) as client,
        _progress() as progress,
        extract.Extractor(limits) as extractor,
    ):
        client.base(name)  # before any work is done
        sources = extract.find_sources(paths, problems)
        sent = progress.add_task("sending", total=len(sources))
        ids: set[str] = set()
        found = _documents(sources, extractor, problems, lambda: progress.advance(sent))
        kept = {"keep": keep, "scorer": scorer}
        documents = (document.model_copy(update=kept) for document in found)
        for batch in batches(documents):
            ids |= _send(client, name, batch, problems)
        if wait:
            _follow(client, name, progress)
        added = [document for document in client.documents(name) if document.id in ids]
    problems += [f"{d.id}: {d.error}" for d in added if d.status == "failed"]
    # Names of files need be no UTF-8.
    problems = [problem.encode(errors="backslashreplace").decode() for problem in problems]
    if as_json:
        _print_json({"documents": added, "problems": problems})
    else:
        _out().print(f"{name}: {_counted(added)}")
    for problem in problems:
        _complain(problem)
    if problems:
        raise typer.Exit(1)


@app.command()
def ls(
    token: Token,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="List the documents of this base.")
    ] = None,
    url: Url = LOCAL,
    as_json: Json = False,
) -> None:
    """List the knowledge bases, or the documents of one."""
    with _client(url, token) as client:
        rows: list[Any] = list(client.bases() if name is None else client.documents(name))
    if as_json:
        _print_json(rows)
    elif rows:
        _out().print(status_tables.bases(rows) if name is None else status_tables.documents(rows))
    elif name is None:
        _out().print("no knowledge bases yet; make one: vllm-segreuse kb create NAME")
    else:
        _out().print(f"{name} is empty; fill it: vllm-segreuse kb add {name} PATH...")


@app.command("show")
def show_text(
    name: Name,
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help="Id of the document.")],
    token: Token,
    url: Url = LOCAL,
    as_json: Json = False,
) -> None:
    """Print the text of a document, as it was made of the file: requests must contain it."""
    with _client(url, token) as client:
        found = client.text(name, document)
    if as_json:
        _print_json(found)
        return
    if found.text is None:
        _complain("the server has no tokenizer: --json shows the tokens")
        raise typer.Exit(1)
    typer.echo(found.text.encode(), nl=False)  # whatever the terminal's encoding is
    if not found.is_exact:
        _complain(
            f"the tokenizer makes other tokens of this text than {document!r} has: send those that "
            "--json shows"
        )


@app.command()
def rm(
    name: Name,
    token: Token,
    ids: Ids = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = LOCAL,
) -> None:
    """Remove documents, or without any ID the whole base."""
    if not ids and not yes:
        if not _is_terminal():
            raise typer.BadParameter("removing a whole base from a script needs --yes")
        typer.confirm(f"Remove {name} with all its documents?", abort=True)
    with _client(url, token) as client:
        for id_ in ids or ():
            client.remove(name, id_)
        if not ids:
            client.delete(name)
    if ids:
        _out().print(f"{name}: removed {len(ids)} document{'' if len(ids) == 1 else 's'}")
    else:
        _out().print(f"{name}: removed, with all its documents")


@app.command()
def warm(
    name: Name,
    token: Token,
    ids: Ids = None,
    wait: Annotated[
        bool, typer.Option(help="Until everything is computed, or only until it is asked for.")
    ] = True,
    url: Url = LOCAL,
    as_json: Json = False,
) -> None:
    """Compute documents that are cold, all of the base or those with an ID."""
    with _client(url, token) as client, _progress() as progress:
        asked = {document.id for document in client.warm(name, ids)}
        if wait:
            _follow(client, name, progress)
        warmed = [d for d in client.documents(name) if d.id in asked]
    if as_json:
        _print_json(warmed)
    else:
        _out().print(f"{name}: {_counted(warmed)}")
    failed = [d for d in warmed if d.status == "failed"]
    for document in failed:
        _complain(f"{document.id}: {document.error}")
    if failed:
        raise typer.Exit(1)


@app.command()
def stats(token: Token, url: Url = LOCAL, as_json: Json = False) -> None:
    """Show how much of the GPU's KV cache the knowledge bases hold, and how often it was used."""
    with _client(url, token) as client:
        answer = client.stats()
    if as_json:
        _print_json(answer)
    else:
        _out().print(status_tables.stats(answer))


def main(arguments: Sequence[str]) -> None:
    """Runs `vllm-segreuse kb` with `arguments`, and ends the process."""
    app(args=list(arguments), prog_name="vllm-segreuse kb")


def _send(
    client: KnowledgeClient, name: str, batch: list[NewDocument], problems: list[str]
) -> set[str]:
    """Adds documents, those that the server does not take left out; ids of those that it took."""
    try:
        return {document.id for document in client.add(name, batch)}
    except RefusedError as error:
        if error.status not in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
            raise
        if len(batch) == 1:
            problems.append(f"{batch[0].id}: {error}")
            return set()
    return {i for document in batch for i in _send(client, name, [document], problems)}


def _documents(
    sources: Sequence[extract.Source],
    extractor: extract.Extractor,
    problems: list[str],
    advance: Callable[[], None],
) -> Iterator[NewDocument]:
    """Reads one file after the other; those that cannot be used become `problems`."""
    seen: dict[str, Path] = {}  # by id
    for source in sources:
        try:
            texts = extractor.read(source)
        except extract.ExtractError as error:
            problems.append(str(error))
            texts = []
        for text in texts:
            if (other := seen.get(text.id)) is not None:
                taken = "used twice" if other == source.path else f"taken by {other}"
                problems.append(f"{source.path}: the id {text.id!r} is {taken}")
                continue
            seen[text.id] = source.path
            try:
                document = NewDocument(id=text.id, text=text.text, metadata=text.metadata)
            except ValidationError as error:
                problems.append(f"{source.path}: {_message(error)}")
            else:
                yield document
        advance()


def _follow(client: KnowledgeClient, name: str, progress: Progress) -> None:
    """Shows how the warming of a base goes on, until it has ended."""
    task = progress.add_task("computing", total=None)
    for base in client.watch(name, POLL_S):
        counts = base.documents
        total = counts.warm + counts.cold + counts.warming + counts.failed
        progress.update(task, total=total, completed=total - counts.warming)


def _counted(documents: Sequence[Any]) -> str:
    by_status = Counter(document.status for document in documents)
    listed = ", ".join(f"{count} {status}" for status, count in sorted(by_status.items()))
    tokens = sum(document.tokens for document in documents)
    plural = "" if len(documents) == 1 else "s"
    return f"{len(documents)} document{plural}, {tokens:,} tokens" + (listed and f" ({listed})")


@contextmanager
def _client(url: str, token: str) -> Iterator[KnowledgeClient]:
    """A client whose errors end the command with one sentence and a status."""
    try:
        with KnowledgeClient(url, token) as client:
            yield client
    except UnreachableError as error:
        _complain(f"{error}; name the server with --url or {URL_ENV}")
        raise typer.Exit(3) from error
    except (ClientError, extract.ExtractError) as error:
        _complain(str(error))
        raise typer.Exit(1) from error
    except ValidationError as error:
        raise typer.BadParameter(_message(error)) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _message(error: ValidationError) -> str:
    [first, *_] = error.errors()
    where = ".".join(str(part) for part in first["loc"])
    value = repr(first["input"])
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    return f"{where or 'the name'}: {first['msg'].removeprefix('Value error, ')} (it is {shown})"


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _out() -> Console:
    # A file or a pipe has no width: tables must not be folded there.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def _print_json(value: Any) -> None:
    print(_JSON.dump_json(value, indent=1).decode())


def _complain(message: str) -> None:
    print(f"vllm-segreuse kb: {message}", file=sys.stderr)
