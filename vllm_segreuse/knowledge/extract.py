# SPDX-License-Identifier: Apache-2.0
"""Text of files and folders, ready to become the documents of a knowledge base.

A document's id is the file's path relative to the folder that was named (the file's name if it was
named itself), so that adding the same folder again, from anywhere, changes what changed and nothing
else. A line of a .jsonl file is a document of its own: `notes.jsonl#7`, unless it brings an id.

Parsing is left to pypdf, Beautiful Soup and markdownify (the extra `kb`).
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class ExtractError(ValueError):
    """No document can be made of a file; the message names it and the cause."""


class Source(NamedTuple):
    """A file, and the id its document gets."""

    path: Path
    id: str


class Text(NamedTuple):
    """One document's id, text and metadata."""

    id: str
    text: str
    metadata: dict[str, Any]


def find_sources(paths: Iterable[Path]) -> list[Source]:
    """The files that `paths` (files, and folders with all below them) name, in a stable order.

    Folders give the files whose suffix is known. Hidden ones are left out, and links to folders are
    not followed.

    Raises:
        ExtractError: a path does not exist, a named file is of an unknown kind, a folder holds no
            file of a known kind, or two different files would get the same id.
    """
    found: dict[str, Path] = {}
    for path in paths:
        for source in _below(path) if path.is_dir() else [_named(path)]:
            other = found.setdefault(source.id, source.path)
            if other.resolve() != source.path.resolve():
                raise ExtractError(
                    f"{other} and {source.path} would both become the document {source.id!r}: "
                    "name the folder above them"
                )
    return [Source(path, id_) for id_, path in found.items()]


def read(source: Source) -> list[Text]:
    """The documents of one file.

    Raises:
        ExtractError: the file cannot be read or parsed, or holds no text.
    """
    try:
        texts = list(READERS[source.path.suffix.lower()](source))
    except ExtractError:
        raise
    except OSError as error:
        raise ExtractError(f"{source.path}: {error.strerror or error}") from error
    except Exception as error:  # a broken file makes the parsers raise whatever they trip over
        raise ExtractError(
            f"{source.path} cannot be parsed ({type(error).__name__}: {error})"
        ) from error
    for text in texts:
        _check(source.path, text)
    if not texts:
        raise ExtractError(f"{source.path} holds no text")
    return texts


def _below(folder: Path) -> Iterator[Source]:
    empty = True
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.suffix.lower() in READERS:
                empty = False
                yield Source(path, path.relative_to(folder).as_posix())
    if empty:
        raise ExtractError(f"{folder} holds no {_KINDS} file")


def _named(path: Path) -> Source:
    if not path.exists():
        raise ExtractError(f"{path} does not exist")
    if path.suffix.lower() not in READERS:
        raise ExtractError(f"{path} is no {_KINDS} file")
    return Source(path, path.name)


def _plain(source: Source) -> Iterator[Text]:
    yield Text(source.id, _decode(source.path), {})


def _json_lines(source: Source) -> Iterator[Text]:
    for number, line in enumerate(_decode(source.path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{source.path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ExtractError(f"{where}: no JSON ({error})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise ExtractError(f'{where}: expected an object with a string "text"')
        id_, metadata = entry.get("id"), entry.get("metadata") or {}
        if not isinstance(id_, str | int | None) or not isinstance(metadata, dict):
            raise ExtractError(f'{where}: "id" must be a string, and "metadata" an object')
        yield Text(f"{source.id}#{number}" if id_ is None else str(id_), entry["text"], metadata)


def _html(source: Source) -> Iterator[Text]:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    # The bytes: Beautiful Soup finds the encoding that the page declares.
    page = BeautifulSoup(source.path.read_bytes(), "html.parser")
    title = page.title.get_text(strip=True) if page.title else ""
    for element in page.find_all(["head", "script", "style", "noscript", "template"]):
        element.decompose()
    # Headings, lists and code keep their marks; the addresses of links are no text.
    converter = MarkdownConverter(heading_style="ATX", bullets="-", strip=["a", "img"])
    yield Text(source.id, converter.convert_soup(page).strip(), {"title": title} if title else {})


def _pdf(source: Source) -> Iterator[Text]:
    from pypdf import PdfReader

    reader = PdfReader(source.path)
    if reader.is_encrypted and not reader.decrypt(""):
        raise ExtractError(f"{source.path} is encrypted: save it without a password")
    pages = [page.extract_text() for page in reader.pages]
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    if not text:
        raise ExtractError(f"{source.path} holds no text, only images: run OCR on it first")
    # Broken fonts give halves of characters, which no encoding knows.
    yield Text(source.id, text.encode(errors="replace").decode(), {"pages": len(pages)})


READERS: dict[str, Callable[[Source], Iterator[Text]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".jsonl": _json_lines,
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
}
"""How the text is read, by suffix (in lower case)."""

_KINDS = "/".join(READERS)


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ExtractError(f"{path} is not UTF-8 (byte {error.start}): convert it first") from error


def _check(path: Path, text: Text) -> None:
    if not text.text.strip():
        raise ExtractError(f"{path}: the document {text.id!r} holds no text")
    try:
        (text.id + text.text).encode()
    except UnicodeEncodeError as error:
        raise ExtractError(
            f"{path}: the document {text.id!r} holds half of a surrogate pair"
        ) from error
