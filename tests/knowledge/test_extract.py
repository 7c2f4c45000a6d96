# SPDX-License-Identifier: Apache-2.0
"""Files become documents with stable ids, or an error that names them."""

import gzip
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from segreuse_tools.knowledge.extract import (
    ExtractError,
    Extractor,
    Source,
    Text,
    find_sources,
)


def pdf(file: Path, *pages: str, password: str | None = None, algorithm: str | None = None) -> Path:
    """A PDF of one line of Helvetica per page, none where the line is empty."""
    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for line in pages:
        page = writer.add_blank_page(300, 300)
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 20 200 Td ({line}) Tj ET".encode() if line else b"")
        page.replace_contents(content.flate_encode())
    if password is not None:
        writer.encrypt(password, "of the owner", algorithm=algorithm)
    writer.write(file)
    return file


EXTRACTOR = Extractor()
read = EXTRACTOR.read


@pytest.fixture(scope="module", autouse=True)
def _closing() -> Iterator[None]:
    yield
    EXTRACTOR.close()


def only(file: Path) -> Text:
    [source] = find_sources([file])
    [text] = read(source)
    return text


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT"])
def test_plain_text_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"\xef\xbb\xbf# Na\xc3\xafve\r\n\r\n  two\n")
    assert only(file) == Text(name, "# Naïve\n\n  two\n", {})


def test_html_gives_its_text_with_structure_and_without_code(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        "<html><head><title>A &amp; B</title><style>p {}</style></head><body><h1>Caf&eacute;</h1>"
        "<p>one <b>bold</b> <a href='https://example.org/x'>link</a></p><script>alert(1)</script>"
        "<ul><li>x</li><li>y</li></ul><pre>if a:\n    b</pre></body></html>"
    )
    text = only(file)
    assert text.metadata == {"title": "A & B"}
    assert [line for line in text.text.splitlines() if line] == [
        "# Café", "one **bold** link", "- x", "- y", "```", "if a:", "    b", "```",
    ]  # fmt: skip


def test_html_declares_its_encoding(tmp_path: Path) -> None:
    file = tmp_path / "old.htm"
    file.write_bytes('<meta charset="iso-8859-1"><p>caf\xe9</p>'.encode("latin-1"))
    assert only(file).text == "café"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<!doctype html><head><title>T</title><body><h1>A</h1><p>one<p>two", "# A\n\none\n\ntwo"),
        ("<head><title>T</title><p>one", "one"),
        ("<title>T</title>one<footer>two", "one\n\ntwo"),
        ("<p>one<aside>two</aside><p>three", "one\n\ntwo\n\nthree"),
        ("<ul><li>a<ul><li>b<li>c</ul><li>d</ul>", "- a\n  - b\n  - c\n- d"),
        ("<ol start=9><li>a<ol><li>b<li>c</ol><li>d</ol>", "9. a\n   1. b\n   2. c\n10. d"),
        ("<dl><dt>a<dd>b<dt>c<dd>d</dl>", "a\n:   b\n\nc\n:   d"),
        (
            "<table><caption>C<thead><tr><th>A<th>B<tbody><tr><td>1<td>2<tfoot><tr><td>3<td>4"
            "</table>",
            "C\n\n| A | B |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |",
        ),
        ("<select><optgroup label=x><option>a<option>b<optgroup><option>c</select>", "a\n\nb\n\nc"),
        ("<ruby>漢<rp>(<rt>kan<rp>)</ruby>", "漢(kan)"),
        (
            '<?xml version="1.0"?><?xml-stylesheet href="x"?><!DOCTYPE html><html xmlns="x"><head>'
            "<title>T</title></head><body><p>a<br/>b</p></body></html>",
            "a  \nb",
        ),
        ("<noscript><p>no</noscript><p>yes<noscript>no</noscript>", "yes"),
        ("<!-- no --><template><p>no</template>yes<!-- no", "yes"),
        ("<style>no</style><p>yes<script>if (a<b) '</p>'</script>", "yes"),
        ("<p>yes<svg><title>no</title></svg><iframe>no</iframe>", "yes"),
        ("<table>before<tr><td>in</table>", "before\n\n|  |\n| --- |\n| in |"),
        ("<p>1 < 2 &amp &copy; &#233;", "1 < 2 & © é"),
        ("x<plaintext><p>y", "x\n\n```\n<p>y\n```"),
    ],
)
def test_html_is_read_as_the_standard_says(tmp_path: Path, page: str, text: str) -> None:
    (tmp_path / "page.html").write_text(page)
    assert only(tmp_path / "page.html").text == text


def test_a_title_is_the_pages_own(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>x<svg><title>drawing</title></svg><title> The\n page </title>")
    assert only(page).metadata == {"title": "The page"}


DEEP = ["<i>", "<div>", "<ul><li>", "<table><tr><td>", "<blockquote>", "<span>a<p>"]


@pytest.mark.parametrize("element", DEEP)
def test_the_text_of_deeply_nested_html_is_read(tmp_path: Path, element: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(element * 5000 + "the text")
    assert "the text" in only(page).text


@pytest.mark.parametrize(
    ("before", "encoding"),
    [
        ("<meta charset=shift_jis>", "cp932"),
        ("<!-- <meta charset=latin1> --><meta charset='Shift_JIS'>", "cp932"),
        ('<meta http-equiv="content-type" content="text/html; charset=EUC-JP">', "euc-jp"),
        ('<?xml version="1.0" encoding="gb2312"?>', "gb18030"),
        ("<meta charset=utf-16>", "utf-8"),
        ("<meta charset=nonsense>", "utf-8"),
        ("", "utf-8"),
        ("<meta charset=latin1>", "utf-8-sig"),
        ("<meta charset=latin1>", "utf-16"),
        ("", "utf-32"),
    ],
)
def test_html_is_read_in_its_encoding(tmp_path: Path, before: str, encoding: str) -> None:
    page = tmp_path / "page.html"
    page.write_bytes(f"{before}<p>日本語、".encode(encoding))
    assert only(page).text == "日本語、"


def test_html_without_a_declaration_is_read_as_browsers_do(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes("<p>“naïve”".encode("cp1252"))
    assert only(tmp_path / "page.html").text == "“naïve”"


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-8"])
def test_a_byte_order_mark_says_the_encoding(tmp_path: Path, name: str, encoding: str) -> None:
    text = '{"text": "naïve"}' if name == "a.jsonl" else "naïve"
    (tmp_path / name).write_bytes(f"\ufeff{text}".encode(encoding))
    assert only(tmp_path / name).text == "naïve"


def test_what_texts_may_hold_is_no_binary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\tb\x0bc\x0cd\x1b[0m\x7f\x85")
    assert only(tmp_path / "a.txt").text == "a\tb\x0bc\x0cd\x1b[0m\x7f\x85"


def test_pdf_pages_are_joined(tmp_path: Path) -> None:
    text = only(pdf(tmp_path / "a.pdf", "First page", "", "Third page"))
    assert text == Text("a.pdf", "First page\n\nThird page", {"pages": 3})


@pytest.mark.parametrize("algorithm", ["RC4-40", "RC4-128", "AES-128", "AES-256-R5", "AES-256"])
def test_a_pdf_that_may_be_read_but_not_changed(tmp_path: Path, algorithm: str) -> None:
    text = only(pdf(tmp_path / "a.pdf", "First page", password="", algorithm=algorithm))
    assert text.text == "First page"


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text(
        '{"text": "one\u2028still one"}\n\n{"text": "two", "id": "second", "metadata": {"k": 1}}\n'
        '{"text": "three", "id": 3}\n'
    )
    [source] = find_sources([file])
    assert read(source) == [
        Text("notes.jsonl#1", "one\u2028still one", {}),
        Text("second", "two", {"k": 1}),
        Text("3", "three", {}),
    ]


def test_ids_are_paths_below_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "docs"
    for name in ("b.md", "a.txt", "sub dir/ü.html", ".hidden.md", ".git/x.md", "image.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    (folder / "loop").symlink_to(folder)
    from_outside = [source.id for source in find_sources([folder])]
    assert from_outside == ["a.txt", "b.md", "sub dir/ü.html"]
    monkeypatch.chdir(folder)
    assert [source.id for source in find_sources([Path(".")])] == from_outside
    assert [source.id for source in find_sources([Path("sub dir/ü.html")])] == ["ü.html"]
    # The same file twice is one document.
    assert len(find_sources([folder, Path("a.txt")])) == 3


def test_two_files_of_one_id_are_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "readme.md").write_text(name)
    with pytest.raises(ExtractError, match=r"x/readme\.md and .*y/readme\.md would both become"):
        find_sources([tmp_path / "x", tmp_path / "y"])


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("missing.txt", "missing.txt does not exist"),
        ("image.png", r"image.png is no .txt/.md/.jsonl/.html/.htm/.pdf file"),
        ("empty", "empty holds no .txt/"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, path: str, complaint: str) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExtractError, match=complaint):
        find_sources([tmp_path / path])


def _write(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "make", "complaint"),
    [
        ("a.txt", _write(b"caf\xe9"), r"a.txt is not UTF-8 \(byte 3\)"),
        ("a.txt", _write(b" \n"), "'a.txt' holds no text"),
        ("a.md", lambda file: file.mkdir(), "a.md is no regular file"),
        ("a.html", _write(b"<script>x</script>"), "'a.html' holds no text"),
        (
            "a.txt",
            _write(b"\x7fELF\2\1\1\0"),
            r"NUL bytes \(the first is byte 7\): it looks binary",
        ),
        ("a.md", _write("one".encode("utf-16-be")), "like UTF-16-BE without a byte-order mark"),
        ("a.txt", _write("one".encode("utf-32-le")), "like UTF-32-LE without a byte-order mark"),
        ("a.txt", _write(b"a\x01b"), r"control character U\+0001 \(at character 1\)"),
        ("a.txt", _write(b"\xff\xfea"), r"is not UTF-16-LE \(byte 2\)"),
        ("a.html", _write(gzip.compress(b"<p>x")), "it looks binary"),
        ("a.html", _write(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"), "it looks binary"),
        ("a.html", _write(pickle.dumps(["x"])), "it looks binary"),
        ("a.html", _write("<p>x".encode("utf-16-le")), "like UTF-16-LE without a byte-order mark"),
        ("a.html", _write(b"<meta charset=utf-8>caf\xe9"), r"is not utf-8 \(byte 23\)"),
        ("a.html", _write("<p>日本語、".encode("cp932")), "is not windows-1252"),
        ("a.jsonl", _write(b'{"text": "a\\u0000b"}'), r"'a.jsonl#1' holds the control .* U\+0000"),
        ("caf\udce9.txt", _write(b"x"), "has a name that is not UTF-8: rename it"),
        ("a.jsonl", _write(b"\n"), "a.jsonl holds no text"),
        ("a.jsonl", _write(b'{"text": "x"}\n{text}'), "a.jsonl, line 2: no JSON"),
        ("a.jsonl", _write(b'"text"'), 'line 1: expected an object with a string "text"'),
        ("a.jsonl", _write(b'{"text": "x", "id": 1.5}'), 'line 1: "id" must be a string'),
        ("a.jsonl", _write(b'{"text": "\\ud800"}'), "holds half of a surrogate pair"),
        ("a.pdf", _write(b"%PDF-1.7 nothing"), "a.pdf cannot be parsed"),
        ("a.pdf", _write(b""), "a.pdf cannot be parsed"),
        ("a.pdf", lambda file: pdf(file, ""), "a.pdf holds no text, only images"),
        ("a.pdf", lambda file: pdf(file, "x", password="p"), "a.pdf is encrypted"),
    ],
)
def test_a_bad_file_is_named_with_the_cause(
    tmp_path: Path, name: str, make: Callable[[Path], object], complaint: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(ExtractError, match=complaint):
        read(Source(tmp_path / name, name))


def test_a_file_that_is_exchanged_for_another_kind_before_it_is_opened_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the folder can do that at any moment; a pipe would wait for ever."""
    file = tmp_path / "a.txt"
    file.write_text("text")
    (source,) = find_sources([file])
    look, left = os.stat, [file]

    def exchanged(path: Any, *given: Any, **named: Any) -> os.stat_result:
        found = look(path, *given, **named)
        if path in left:
            left.clear()
            file.unlink()
            os.mkfifo(file)
        return found

    with Extractor() as extractor, monkeypatch.context() as patch:
        patch.setattr(os, "stat", exchanged)
        with pytest.raises(ExtractError, match=r"a\.txt is no regular file"):
            extractor.read(source)
