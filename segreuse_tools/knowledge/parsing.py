# SPDX-License-Identifier: Apache-2.0
"""Text of one file after the other, in a process of its own that may be killed (`extract.py`).

Run as a script, `python parsing.py SOCKET`: it imports nothing of this package. Each request comes
with the open file; the answer is a line of JSON.

Parsing is left to pypdf, justhtml, Beautiful Soup and markdownify (the extra `kb`).
"""

from __future__ import annotations

import codecs
import json
import os
import re
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
    if not _is_encodable(request.id):
        raise ParseError(" has a name that is not UTF-8: rename it")
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


# What no text has, by the standard that tells browsers text from binary data (MIME Sniffing,
# "binary data byte"), without the vertical tab, which presentations have for line breaks.
_BINARY = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def _check(text: Text) -> None:
    if not text.text.strip():
        raise ParseError(f": the document {text.id!r} holds no text")
    if not _is_encodable(text.id + text.text):
        raise ParseError(f": the document {text.id!r} holds half of a surrogate pair")
    if found := _BINARY.search(text.text):
        raise ParseError(
            f": the document {text.id!r} holds the control character U+{ord(found[0]):04X} (at "
            f"character {found.start()}): it looks binary"
        )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


_HIDDEN = frozenset({"title", "script", "style", "template", "iframe"}) | frozenset(
    {"noscript", "noframes", "noembed"}
)
"""Elements whose text no browser shows. What else is in a head has no text."""

_BLOCKS = (
    *("address", "aside", "center", "details", "dialog", "fieldset", "figure", "footer", "form"),
    *("header", "hgroup", "legend", "main", "nav", "optgroup", "option", "search", "summary"),
)
_SHOWN_AS = {
    **dict.fromkeys(_BLOCKS, "div"),
    **dict.fromkeys(("listing", "plaintext", "xmp"), "pre"),
    **dict.fromkeys(("dir", "menu"), "ul"),
    "tfoot": "tbody",
}
"""Elements that browsers show as blocks, and what markdownify knows in their place."""

_MAX_DEPTH = 200
"""Elements inside of each other that keep their marks; what is deeper gives its text. Converting
recurses, and does what is inside again for each element around it."""


def _html(content: bytes, request: Request) -> Iterator[Text]:
    from bs4 import BeautifulSoup
    from justhtml import JustHTML

    # As the standard for HTML says, which closes what a page leaves open.
    page = JustHTML(_decode_html(content), sanitize=False)
    shown = BeautifulSoup("", "html.parser")
    title = " ".join(_show(page.root, shown).split())
    text = _converter().convert_soup(shown).strip()
    yield Text(request.id, text, {"title": title} if title else {})


def _converter() -> Any:
    """Headings, lists and code keep their marks; the addresses of links are no text."""
    from bs4 import Tag
    from markdownify import MarkdownConverter

    class Converter(MarkdownConverter):
        """Numbers the items of a list as they come: markdownify counts those in front of each."""

        def __init__(self) -> None:
            super().__init__(heading_style="ATX", bullets="-", strip=["a", "img"])
            self._next: dict[int, int] = {}  # by list

        def convert_li(self, el: Any, text: str, parent_tags: Any) -> str:
            if el.parent.name == "ol":
                start = el.parent.get("start", "")
                first = int(start) if start.isdecimal() and len(start) < 10 else 1
                number = self._next.setdefault(id(el.parent), first)
                self._next[id(el.parent)] += 1
                el = Tag(name="li")
                Tag(name="ol", attrs={"start": str(number)}).append(el)
            return str(super().convert_li(el, text, parent_tags))  # type: ignore[misc]

    return Converter()


def _show(page: Any, shown: Any) -> str:
    """Give an empty soup what a browser shows of a page; returns the page's title."""
    title, open_ = "", [("", iter(page.children))]
    shown.reset()
    while open_:
        name, children = open_[-1]
        node = next(children, None)
        if node is None:
            open_.pop()
            if name:
                shown.handle_endtag(name)
        elif node.name == "#text":
            shown.handle_data(node.data)
        elif node.name == "title" and node.namespace in (None, "html") and not title:
            title = "".join(child.data or "" for child in node.children)
        elif not node.name.startswith(("#", "!", "?")) and node.name not in _HIDDEN:
            name = _SHOWN_AS.get(node.name, node.name) if len(open_) < _MAX_DEPTH else ""
            if name:
                attributes = {key: value or "" for key, value in node.attrs.items()}
                shown.handle_starttag(name, None, None, attributes)
            else:
                shown.handle_data("\n")
            open_.append((name, iter(node.children)))
    shown.endData()
    shown.popTag()
    return title


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
    # Broken fonts give halves of characters, which no encoding knows, and numbers of their glyphs.
    text = _BINARY.sub("\ufffd", text.encode(errors="replace").decode())
    yield Text(request.id, text, {"pages": len(pages)})


PARSERS: dict[str, Callable[[bytes, Request], Iterator[Text]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".jsonl": _json_lines,
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
}
"""How the text is read, by suffix (in lower case)."""


_MARKS = {
    codecs.BOM_UTF8: "UTF-8",
    codecs.BOM_UTF32_LE: "UTF-32-LE",  # begins with the mark of UTF-16-LE
    codecs.BOM_UTF32_BE: "UTF-32-BE",
    codecs.BOM_UTF16_LE: "UTF-16-LE",
    codecs.BOM_UTF16_BE: "UTF-16-BE",
}
"""Byte-order marks."""

_WIDER = {"shift_jis": "cp932", "euc-kr": "cp949", "gbk": "gb18030", "big5": "big5hkscs"}
"""Python's codecs for what the standard for encodings means by these names."""


def _decode(content: bytes) -> str:
    """Text in UTF-8, or in what a byte-order mark says."""
    mark = _mark(content)
    text = _decoded(content[len(mark) :], _MARKS.get(mark, "UTF-8"), len(mark))
    return text.replace("\r\n", "\n")


def _decode_html(content: bytes) -> str:
    """The same, or in the encoding that a page declares; without one, as browsers guess."""
    import webencodings
    from bs4.dammit import EncodingDetector

    mark = _mark(content)
    beginning = re.sub(rb"<!--.*?(-->|\Z)", b"", content[: 1 << 16], flags=re.DOTALL)
    label = EncodingDetector.find_declared_encoding(beginning, is_html=True)
    declared = webencodings.lookup(label) if label and not mark else None
    if declared is None:
        try:
            return _decode(content)
        except UnicodeError:
            return _decoded(content, "windows-1252")
    if declared.name.startswith("utf-16"):  # the declaration itself could not be read then
        return _decoded(content, "UTF-8")
    return _decoded(content, _WIDER.get(declared.name, declared.codec_info.name))


def _mark(content: bytes) -> bytes:
    return next((mark for mark in _MARKS if content.startswith(mark)), b"")


def _decoded(content: bytes, encoding: str, start: int = 0) -> str:
    """Bytes of a file from `start` on as text."""
    if not encoding.startswith(("UTF-16", "UTF-32")) and (nul := content.find(0)) >= 0:
        wide = _wide(content)
        looks = f"like {wide} without a byte-order mark: save it as UTF-8" if wide else "binary"
        raise ParseError(f" holds NUL bytes (the first is byte {start + nul}): it looks {looks}")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise _EncodingError(
            f" is not {encoding} (byte {start + error.start}): convert it first"
        ) from error


class _EncodingError(ParseError, UnicodeError):
    """Bytes that are not in an encoding."""


def _wide(content: bytes) -> str | None:
    """The encoding of more than one byte a letter in which bytes would be text of mostly ASCII
    letters, if there is one."""
    for encoding in _MARKS.values():
        if encoding != "UTF-8":
            try:
                text = codecs.getincrementaldecoder(encoding)().decode(content[:4096])
            except UnicodeDecodeError:
                continue
            if sum(map(str.isascii, text)) * 2 > len(text) and not _BINARY.search(text):
                return encoding
    return None


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
