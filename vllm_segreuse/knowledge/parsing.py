# SPDX-License-Identifier: Apache-2.0
"""Text of one file after the other, in a process of its own that may be killed (`extract.py`).

Run as a script, `python parsing.py SOCKET`: it imports nothing of this package. Each request comes
with the open file; the answer is a line of JSON.

Parsing is left to pypdf, Beautiful Soup and markdownify (the extra `kb`).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class ParseError(ValueError):
    """No document can be made of a file; the message goes behind its name."""


class Text(NamedTuple):
    """One document's id, text and metadata."""

    id: str
    text: str
    metadata: dict[str, Any]


class Request(NamedTuple):
    """A file to parse.

    Attributes:
        suffix: which parser, a key of `PARSERS`.
        id: of its document.
        max_bytes: of the file, and of all text in it.
        max_pages: of a PDF.
        max_seconds: after so many this process ends by itself, if nobody has ended it before.
    """

    suffix: str
    id: str
    max_bytes: int
    max_pages: int
    max_seconds: float


def parse(content: bytes, request: Request) -> list[Text]:
    """The documents of one file.

    Raises:
        ParseError: it cannot be parsed, or holds no text or too much of it.
    """
    if len(content) > request.max_bytes:
        raise ParseError(f" has more than {request.max_bytes} bytes: raise --max-bytes or split it")
    texts, size = [], 0
    try:
        for text in PARSERS[request.suffix](content, request):
            _check(text)
            size += len(text.text)
            if size > request.max_bytes:
                raise ParseError(
                    f" holds more than {request.max_bytes} characters of text: raise "
                    "--max-bytes or split it"
                )
            texts.append(text)
    except (ParseError, MemoryError):
        raise
    except Exception as error:  # a broken file makes the parsers raise whatever they trip over
        raise ParseError(f" cannot be parsed ({type(error).__name__}: {error})") from error
    if not texts:
        raise ParseError(" holds no text")
    return texts


def _check(text: Text) -> None:
    if not text.text.strip():
        raise ParseError(f": the document {text.id!r} holds no text")
    try:
        (text.id + text.text).encode()
    except UnicodeEncodeError as error:
        raise ParseError(f": the document {text.id!r} holds half of a surrogate pair") from error


def _plain(content: bytes, request: Request) -> Iterator[Text]:
    yield Text(request.id, _decode(content), {})


def _json_lines(content: bytes, request: Request) -> Iterator[Text]:
    for number, line in enumerate(_decode(content).split("\n"), 1):
        if not line.strip():
            continue
        where = f", line {number}:"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ParseError(f"{where} no JSON ({error})") from error
        except RecursionError as error:
            raise ParseError(f"{where} nested too deeply") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise ParseError(f'{where} expected an object with a string "text"')
        id_, metadata = entry.get("id"), entry.get("metadata") or {}
        if isinstance(id_, bool) or not isinstance(id_, str | int | None):
            raise ParseError(f'{where} "id" must be a string')
        if not isinstance(metadata, dict):
            raise ParseError(f'{where} "metadata" must be an object')
        yield Text(f"{request.id}#{number}" if id_ is None else str(id_), entry["text"], metadata)


def _html(content: bytes, request: Request) -> Iterator[Text]:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    # The bytes: Beautiful Soup finds the encoding that the page declares.
    page = BeautifulSoup(content, "html.parser")
    title = page.title.get_text(strip=True) if page.title else ""
    for element in page.find_all(["head", "script", "style", "noscript", "template"]):
        element.decompose()
    # Headings, lists and code keep their marks; the addresses of links are no text.
    converter = MarkdownConverter(heading_style="ATX", bullets="-", strip=["a", "img"])
    yield Text(request.id, converter.convert_soup(page).strip(), {"title": title} if title else {})


def _pdf(content: bytes, request: Request) -> Iterator[Text]:
    from io import BytesIO

    from pypdf import PdfReader

    reader = PdfReader(BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ParseError(" is encrypted: save it without a password")
    if len(reader.pages) > request.max_pages:
        raise ParseError(
            f" has {len(reader.pages)} pages, more than {request.max_pages}: raise --max-pages or "
            "split it"
        )
    pages = [page.extract_text() for page in reader.pages]
    text = "\n\n".join(page.strip() for page in pages if page.strip())
    if not text:
        raise ParseError(" holds no text, only images: run OCR on it first")
    # Broken fonts give halves of characters, which no encoding knows.
    yield Text(request.id, text.encode(errors="replace").decode(), {"pages": len(pages)})


PARSERS: dict[str, Callable[[bytes, Request], Iterator[Text]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".jsonl": _json_lines,
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
}
"""How the text is read, by suffix (in lower case)."""


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ParseError(f" is not UTF-8 (byte {error.start}): convert it first") from error


def _answer(line: bytes, file: int) -> bytes | None:
    """None: there is not enough memory."""
    request = Request(*json.loads(line))
    # Whoever waits kills this process in time; nobody does if that one has been killed itself.
    signal.setitimer(signal.ITIMER_REAL, request.max_seconds + 10)
    try:
        with os.fdopen(file, "rb") as opened:
            content = opened.read(request.max_bytes + 1)
        return _encoded({"texts": parse(content, request)})
    except OSError as error:
        return _encoded({"error": f" cannot be read: {error.strerror or error}"})
    except ParseError as error:
        return _encoded({"error": str(error)})
    except RecursionError:
        return _encoded({"error": " cannot be parsed: its metadata is nested too deeply"})
    except MemoryError:
        return None


def _encoded(answer: dict[str, Any]) -> bytes:
    # Ids that come of names of files need be no UTF-8.
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def serve(connection: socket.socket) -> None:
    """Answer requests until nobody asks any more, or there is no memory left."""
    while True:
        line, files, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        if not line:
            return
        answer = _answer(line, files[0])
        connection.sendall(_encoded({"memory": True}) if answer is None else answer)
        if answer is None:
            return  # with what is left of it nothing else should be tried
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """`python parsing.py SOCKET MEMORY`: descriptor of the socket, most bytes of address space."""
    descriptor, memory = map(int, sys.argv[1:])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=descriptor) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
