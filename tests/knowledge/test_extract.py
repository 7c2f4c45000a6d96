# SPDX-License-Identifier: Apache-2.0
"""Files become documents with stable ids, or an error that names them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from vllm_segreuse.knowledge.extract import (
    ExtractError,
    Extractor,
    Source,
    Text,
    find_sources,
)


def pdf(file: Path, *pages: str, password: str | None = None) -> Path:
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
        page[NameObject("/Contents")] = writer._add_object(content)
    if password:
        writer.encrypt(password)
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


def test_pdf_pages_are_joined(tmp_path: Path) -> None:
    text = only(pdf(tmp_path / "a.pdf", "First page", "", "Third page"))
    assert text == Text("a.pdf", "First page\n\nThird page", {"pages": 3})


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
        ("a.html", _write(b"<i>" * 5000 + b"x"), "a.html cannot be parsed"),
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
