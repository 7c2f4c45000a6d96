# SPDX-License-Identifier: Apache-2.0
"""Files may be anybody's: none of them hangs the command, takes its memory, or leads elsewhere."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfReader, PdfWriter
from pypdf.generic import DecodedStreamObject

from segreuse_tools.knowledge import extract, parsing
from segreuse_tools.knowledge.extract import ExtractError, Extractor, Limits, Source, find_sources
from tests.knowledge.test_extract import pdf

LOOPS = b"BT /F1 12 Tf " + b"(x) Tj " * 1_000_000 + b"ET"
"""7 MB of a PDF's content, which take seconds, in a file of 10 kB."""


def read(file: Path, **limits: float) -> list[extract.Text]:
    with Extractor(Limits()._replace(**limits)) as extractor:
        return extractor.read(Source(file, file.name))


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that extractors have started, in order."""
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def starting(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(extract.subprocess, "Popen", starting)
    return started


def packed_pdf(file: Path, content: bytes) -> Path:
    """A PDF of one page with this content, compressed."""
    writer = PdfWriter(clone_from=PdfReader(pdf(file, "x")))
    stream = DecodedStreamObject()
    stream.set_data(content)
    writer.pages[0].replace_contents(stream.flate_encode())
    writer.write(file)
    return file


def test_a_file_is_read_up_to_the_limit_and_not_above_it(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 100)
    assert read(file, max_bytes=100)[0].text == "x" * 100
    with pytest.raises(ExtractError, match=r"a\.txt has 100 bytes, more than 99: raise --max-byte"):
        read(file, max_bytes=99)


def test_a_file_that_grows_is_not_read_above_the_limit(tmp_path: Path) -> None:
    # As those below /proc do: they say that they are empty.
    (tmp_path / "status.txt").symlink_to("/proc/self/status")
    with pytest.raises(ExtractError, match="has more than 10 bytes: raise --max-bytes"):
        read(tmp_path / "status.txt", max_bytes=10)


def test_text_that_unfolds_counts_too(tmp_path: Path) -> None:
    file = packed_pdf(tmp_path / "a.pdf", LOOPS[:63_013] + b" ET")
    assert file.stat().st_size < 5000
    with pytest.raises(ExtractError, match=r"holds more than 5000 characters of text: raise"):
        read(file, max_bytes=5000)


def test_a_pdf_has_no_more_pages_than_the_limit(tmp_path: Path) -> None:
    file = pdf(tmp_path / "a.pdf", "one", "two", "three")
    assert read(file, max_pages=3)[0].metadata == {"pages": 3}
    with pytest.raises(ExtractError, match=r"a\.pdf has 3 pages, more than 2: raise --max-pages"):
        read(file, max_pages=2)


@pytest.mark.parametrize("kind", ["pdf", "html"])
def test_what_takes_too_long_is_killed_and_the_next_file_is_read(
    tmp_path: Path, kind: str, parsers: list[subprocess.Popen[bytes]]
) -> None:
    slow = tmp_path / f"slow.{kind}"
    if kind == "pdf":
        packed_pdf(slow, LOOPS)
    else:
        slow.write_bytes(b"".join(b"<p><font size=%d>" % size for size in range(3000)))
    (tmp_path / "good.txt").write_text("good")
    with Extractor(Limits(max_seconds=0.5)) as extractor:
        with pytest.raises(ExtractError, match=r"takes more than 0\.5 seconds .* --max-seconds"):
            extractor.read(Source(slow, "slow"))
        assert [parser.returncode for parser in parsers] == [-signal.SIGKILL], "and waited for"
        assert extractor.read(Source(tmp_path / "good.txt", "good"))[0].text == "good"


def test_what_needs_too_much_memory_is_refused_and_the_next_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lists.jsonl"
    file.write_bytes(b'{"text": "x", "metadata": {"k": [' + b"[]," * 2_000_000 + b"[]]}}")
    (tmp_path / "good.txt").write_text("good")
    with Extractor(Limits(max_memory_bytes=150 * 2**20)) as extractor:
        with pytest.raises(ExtractError, match=r"more than 157286400 bytes of memory .*--max-mem"):
            extractor.read(Source(file, "lists"))
        assert extractor.read(Source(tmp_path / "good.txt", "good"))[0].text == "good"


def test_a_small_pdf_that_unfolds_to_gigabytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtractError, match=r"zeros\.pdf (cannot be parsed|needs more than)"):
        read(packed_pdf(tmp_path / "zeros.pdf", bytes(100 * 2**20)), max_memory_bytes=400 * 2**20)


def test_a_parser_that_dies_is_an_error_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    crashing = tmp_path / "crashing.py"
    crashing.write_text("import os\nos.abort()\n")
    monkeypatch.setattr(parsing, "__file__", str(crashing))
    with pytest.raises(ExtractError, match=r"a\.txt makes the parser crash"):
        read(tmp_path / "a.txt")


def test_one_process_reads_all_files_and_ends_with_the_extractor(
    tmp_path: Path, parsers: list[subprocess.Popen[bytes]]
) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with Extractor() as extractor:
        extractor.read(Source(tmp_path / "a.txt", "a"))
        with pytest.raises(ExtractError, match="UTF-8"):
            extractor.read(Source(tmp_path / "b.txt", "b"))
        assert extractor.read(Source(tmp_path / "a.txt", "a"))[0].id == "a"
        (process,) = parsers
        files = len(os.listdir("/proc/self/fd"))
        extractor.read(Source(tmp_path / "a.txt", "a"))
        assert len(os.listdir("/proc/self/fd")) == files
        assert len(os.listdir(f"/proc/{process.pid}/fd")) <= 4, "files are closed there, too"
    assert process.returncode is not None
    assert parsers == [process]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_fifo, _socket, _device])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_special_file_is_never_opened(
    tmp_path: Path, make: Callable[[Path], None], is_named: bool
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    make(folder / "special.txt")
    (folder / "z.txt").write_text("text")
    special, *_ = find_sources([folder / "special.txt"] if is_named else [folder])
    with pytest.raises(ExtractError, match=r"special\.txt is no regular file"), Extractor() as e:
        e.read(special)


def test_links_out_of_a_folder_are_refused_and_those_inside_are_read(tmp_path: Path) -> None:
    folder, secret = tmp_path / "docs", tmp_path / "secret.txt"
    (folder / "sub").mkdir(parents=True)
    secret.write_text("secret")
    (folder / "a.txt").write_text("inside")
    (folder / "b.txt").symlink_to("a.txt")
    (folder / "sub" / "c.txt").symlink_to("../a.txt")
    (folder / "out.txt").symlink_to(secret)
    (folder / "out2.txt").symlink_to("../docs-other.txt")
    (tmp_path / "docs-other.txt").write_text("its name begins with the folder's")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "gone.txt").symlink_to("nowhere")
    texts, errors = {}, {}
    with Extractor() as extractor:
        for source in find_sources([folder]):
            try:
                texts[source.id] = extractor.read(source)[0].text
            except ExtractError as error:
                errors[source.id] = str(error)
        assert texts == dict.fromkeys(("a.txt", "b.txt", "sub/c.txt"), "inside")
        assert errors.keys() == {"out.txt", "out2.txt", "loop.txt", "gone.txt"}
        for name in ("out.txt", "out2.txt"):
            assert "is a link out of" in errors[name]
        # Whoever names a link means it, a link to a folder too.
        assert extractor.read(*find_sources([folder / "out.txt"]))[0].text == "secret"
        (tmp_path / "link").symlink_to(folder)
        [first, *_] = find_sources([tmp_path / "link"])
        assert extractor.read(first)[0].text == "inside"


def test_a_folder_that_is_exchanged_for_a_link_leads_nowhere(tmp_path: Path) -> None:
    folder, outside = tmp_path / "docs", tmp_path / "outside"
    for place in (folder / "sub", outside):
        place.mkdir(parents=True)
        (place / "a.txt").write_text(place.name)
    [source] = find_sources([folder])
    (folder / "sub").rename(tmp_path / "before")
    (folder / "sub").symlink_to(outside)
    with pytest.raises(ExtractError, match="is a link out of"), Extractor() as extractor:
        extractor.read(source)


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scan = os.scandir

    def refusing(path: object) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ExtractError, match="sub: Permission denied"):
        find_sources([tmp_path])
    problems: list[str] = []
    found = find_sources([tmp_path, tmp_path / "sub"], problems)
    assert [source.id for source in found] == ["a.txt"]
    assert problems == [f"{tmp_path}/sub: Permission denied"] * 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"[" * 100_000, "line 1: nested too deeply"),
        (b'{"text": "x"}\n' + b'{"a":' * 100_000, "line 2: nested too deeply"),
        (b'{"text": "\xff"}', r"is not UTF-8 \(byte 10\)"),
        (b'{"text": "\0"}', r"holds NUL bytes \(the first is byte 10\)"),
        (b'\0{"text": "x"}', r"holds NUL bytes \(the first is byte 0\)"),
        (b'{"text": "x", "id": 1' + b"0" * 5000 + b"}", "line 1: no JSON"),
        (b'{"text": "x", "id": true}', '"id" must be a string'),
        (b'{"text": "x", "metadata": [1]}', '"metadata" must be an object'),
    ],
)
def test_json_lines_of_any_kind_are_a_sentence(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ExtractError, match=complaint):
        read(tmp_path / "a.jsonl")


def test_limits_of_files_are_generous_by_default() -> None:
    assert Limits() == (64 * 2**20, 5000, 60.0, 2 * 2**30)


def test_a_file_that_becomes_special_before_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("regular")
    look = os.stat

    def exchange(path: Path) -> os.stat_result:
        status = look(path)
        file.unlink()
        os.mkfifo(file)
        return status

    monkeypatch.setattr(extract.os, "stat", exchange)
    signal.alarm(20)  # whoever hangs here would hang for ever
    try:
        with pytest.raises(ExtractError, match=r"a\.txt is no regular file"):
            read(file, max_bytes=100)
    finally:
        signal.alarm(0)


def test_a_file_that_never_ends_is_read_up_to_the_limit(tmp_path: Path) -> None:
    class Endless:
        def __init__(self, file: int, mode: str) -> None:
            self.file = file

        def __enter__(self) -> "Endless":
            return self

        def __exit__(self, *error: object) -> None:
            os.close(self.file)

        def read(self, size: int = -1) -> bytes:
            assert 0 <= size <= 11, "more is asked for than the limit"
            return b"x" * size

    file = tmp_path / "a.txt"
    file.touch()
    request = json.dumps(parsing.Request(".txt", "a.txt", 10, 1, 60.0)).encode()
    asking, answering = socket.socketpair()
    with asking, answering, file.open("rb") as opened, pytest.MonkeyPatch.context() as patch:
        socket.send_fds(asking, [request], [opened.fileno()])
        asking.shutdown(socket.SHUT_WR)
        patch.setattr(parsing.os, "fdopen", Endless)
        patch.setattr(parsing.signal, "setitimer", lambda *args: None)
        parsing.serve(answering)
        assert b"has more than 10 bytes" in asking.recv(1 << 16)
