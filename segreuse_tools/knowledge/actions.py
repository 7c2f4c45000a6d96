# SPDX-License-Identifier: Apache-2.0
"""What the commands below `vllm-segreuse kb` do, and how their errors end them."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from segreuse_tools.knowledge import URL_ENV, extract, status_tables
from segreuse_tools.knowledge.client import (
    ClientError,
    KnowledgeClient,
    RejectedError,
    UnreachableError,
    batches,
)
from segreuse_tools.terminal import complain, print_all, printable, write_all
from vllm_segreuse.features.knowledge.schemas import NewDocument

POLL_S = 0.5
DONE, REFUSED, BAD_INPUT, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130

_JSON: TypeAdapter[Any] = TypeAdapter(Any)


def run(name: str, given: Namespace, misused: Callable[[str], NoReturn]) -> int:
    """Do what a command says; returns the exit status.

    Args:
        name: of the command.
        given: its arguments, with the server's `url` and `token`.
        misused: ends the process with a sentence on a wrong command line.
    """
    try:
        with KnowledgeClient(given.url, given.token) as client:
            return _ACTIONS[name](client, given)
    except UnreachableError as error:
        complain("kb", f"{error}; name the server with --url or {URL_ENV}")
        return UNREACHABLE
    except (ClientError, extract.ExtractError) as error:
        complain("kb", error)
        return REFUSED
    except ValidationError as error:
        misused(_message(error))
    except ValueError as error:
        misused(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _create(client: KnowledgeClient, given: Namespace) -> int:
    base = client.create(
        given.name,
        extra_key=given.extra_key,
        preamble=given.preamble,
        context=given.context,
    )
    if given.json:
        _print_json(base)
    else:
        key = base.extra_key
        _out().print(f'{given.name}: requests with extra_keys ["{key}"] reuse its documents')
    return DONE


def _add(client: KnowledgeClient, given: Namespace) -> int:
    if given.keep == 0:
        raise ValueError("--keep must be above 0 and at most 1")
    if given.scorer is not None and given.keep is None:
        raise ValueError("--scorer needs --keep")
    problems: list[str] = []
    limits = extract.Limits(given.max_bytes, given.max_pages, given.max_seconds, given.max_memory)
    with _progress() as progress, extract.Extractor(limits) as extractor:
        client.base(given.name)  # before any work is done
        sources = extract.find_sources(given.paths, problems)
        sent = progress.add_task("sending", total=len(sources))
        ids: set[str] = set()
        found = _documents(sources, extractor, problems, lambda: progress.advance(sent))
        kept = {"keep": given.keep, "scorer": given.scorer}
        documents = (document.model_copy(update=kept) for document in found)
        try:
            for batch in batches(documents):
                ids |= _send(client, given.name, batch, problems)
            if given.wait:
                _follow(client, given.name, progress)
            added = [document for document in client.documents(given.name) if document.id in ids]
        except (ClientError, KeyboardInterrupt):
            _complain_of(problems)  # what ends it here is no reason to forget these
            raise
    problems += [f"{d.id}: {d.error}" for d in added if d.status == "failed"]
    if given.json:
        _print_json({"documents": added, "problems": [printable(it) for it in problems]})
    else:
        _out().print(f"{given.name}: {_counted(added)}")
    _complain_of(problems)
    return REFUSED if problems else DONE


def _complain_of(problems: Sequence[str]) -> None:
    for problem in problems:
        complain("kb", printable(problem))


def _ls(client: KnowledgeClient, given: Namespace) -> int:
    name = given.name
    rows: list[Any] = list(client.bases() if name is None else client.documents(name))
    if given.json:
        _print_json(rows)
    elif rows:
        _out().print(status_tables.bases(rows) if name is None else status_tables.documents(rows))
    elif name is None:
        _out().print("no knowledge bases yet; make one: vllm-segreuse kb create NAME")
    else:
        _out().print(f"{name} is empty; fill it: vllm-segreuse kb add {name} PATH...")
    return DONE


def _show(client: KnowledgeClient, given: Namespace) -> int:
    found = client.text(given.name, given.document)
    if given.json:
        _print_json(found)
        return DONE
    if found.text is None:
        complain("kb", "the server has no tokenizer: --json shows the tokens")
        return REFUSED
    write_all(found.text.encode())
    if not found.is_exact:
        complain(
            "kb",
            f"the tokenizer makes other tokens of this text than {given.document!r} has: send "
            "those that --json shows",
        )
    return DONE


def _rm(client: KnowledgeClient, given: Namespace) -> int:
    name, ids = given.name, given.ids
    if not ids and not given.yes:
        if not _is_terminal():
            raise ValueError("removing a whole base from a script needs --yes")
        if not _is_confirmed(f"Remove {name} with all its documents?"):
            return REFUSED
    for document_id in ids:
        client.remove(name, document_id)
    if ids:
        _out().print(f"{name}: removed {len(ids)} document{'' if len(ids) == 1 else 's'}")
    else:
        client.delete(name)
        _out().print(f"{name}: removed, with all its documents")
    return DONE


def _warm(client: KnowledgeClient, given: Namespace) -> int:
    with _progress() as progress:
        asked = {document.id for document in client.warm(given.name, given.ids or None)}
        if given.wait:
            _follow(client, given.name, progress)
        warmed = [d for d in client.documents(given.name) if d.id in asked]
    if given.json:
        _print_json(warmed)
    else:
        _out().print(f"{given.name}: {_counted(warmed)}")
    failed = [d for d in warmed if d.status == "failed"]
    for document in failed:
        complain("kb", f"{document.id}: {document.error}")
    return REFUSED if failed else DONE


def _stats(client: KnowledgeClient, given: Namespace) -> int:
    answer = client.stats()
    if given.json:
        _print_json(answer)
    else:
        _out().print(status_tables.stats(answer))
    return DONE


_ACTIONS: dict[str, Callable[[KnowledgeClient, Namespace], int]] = {
    "create": _create,
    "add": _add,
    "ls": _ls,
    "show": _show,
    "rm": _rm,
    "warm": _warm,
    "stats": _stats,
}


def _send(
    client: KnowledgeClient, name: str, batch: list[NewDocument], problems: list[str]
) -> set[str]:
    """Adds documents, those that the server does not take left out; ids of those that it took."""
    try:
        return {document.id for document in client.add(name, batch)}
    except RejectedError as error:
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
        total = sum(counts.model_dump().values())
        progress.update(task, total=total, completed=total - counts.warming)


def _counted(documents: Sequence[Any]) -> str:
    by_status = Counter(document.status for document in documents)
    listed = ", ".join(f"{count} {status}" for status, count in sorted(by_status.items()))
    tokens = sum(document.tokens for document in documents)
    plural = "" if len(documents) == 1 else "s"
    return f"{len(documents)} document{plural}, {tokens:,} tokens" + (listed and f" ({listed})")


def _message(error: ValidationError) -> str:
    [first, *_] = error.errors()
    where = ".".join(str(part) for part in first["loc"])
    value = repr(first["input"])
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    return (
        f"{where or 'the name or id'}: {first['msg'].removeprefix('Value error, ')} (it is {shown})"
    )


def _is_confirmed(question: str) -> bool:
    """Whether a person says yes."""
    try:
        return input(f"{question} [y/N]: ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


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
    print_all(_JSON.dump_json(value, indent=1).decode())
