# SPDX-License-Identifier: Apache-2.0
"""Logs: what is read, and one clear sentence for what is not."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from segreuse_tools.estimate.request_log import LeftOut, LogError, Logged, read_log
from tests.estimate import logs

CHAT = {"messages": [{"role": "user", "content": "Who?"}]}


def read(tmp_path: Path, *lines: Any) -> list[Logged]:
    return read_log(logs.write(tmp_path / "log.jsonl", list(lines)))


def test_bodies_and_batch_files_are_read(tmp_path: Path) -> None:
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    found = read(tmp_path, {"prompt": "a"}, CHAT, batch, {"prompt": [1, 2]})
    assert [one.body for one in found] == [{"prompt": "a"}, CHAT, CHAT, {"prompt": [1, 2]}]
    assert [one.is_chat for one in found] == [False, True, True, False]
    assert found[3].where.endswith("log.jsonl, line 4")


def test_what_stands_beside_the_body(tmp_path: Path) -> None:
    beside = {"timestamp": 12.5, "answer": "He.", "extra_keys": "team"}
    inner, outer = read(tmp_path, CHAT | beside, {"body": CHAT} | beside)
    assert inner == Logged(inner.where, CHAT | {"extra_keys": "team"}, 12.5, "He.")
    assert (outer.body, outer.time_s, outer.answer) == (inner.body, 12.5, "He.")


def test_extra_keys_of_a_body_stay(tmp_path: Path) -> None:
    body = CHAT | {"extra_keys": ["a", "b"]}
    assert [one.body for one in read(tmp_path, {"body": body})] == [body]


def test_times_are_seconds_or_iso_8601(tmp_path: Path) -> None:
    times: list[Any] = [0, 1.5, "1970-01-01T00:00:02+00:00", "1970-01-01 00:00:03Z", None]
    found = read(tmp_path, *({"prompt": "a", "timestamp": time} for time in times))
    assert [one.time_s for one in found] == [0.0, 1.5, 2.0, 3.0, None]


def test_other_separators_of_lines_are_text(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    text = "a\u2028b\u2029c\u0085d"
    file.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert [one.body for one in read_log(file)] == [{"prompt": text}]


def test_a_file_may_begin_with_a_byte_order_mark_or_be_compressed(tmp_path: Path) -> None:
    file, lines = tmp_path / "log.jsonl", b'{"prompt": "a"}\r\n{"prompt": "\xc3\xa9"}\n'
    for content in (b"\xef\xbb\xbf" + lines, gzip.compress(lines), lines.replace(b"\n", b"")):
        file.write_bytes(content)
        assert [one.body["prompt"] for one in read_log(file)] == ["a", "é"]


def test_blank_lines_count_and_are_no_requests(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [one.where[-6:] for one in read_log(file)] == ["line 2", "line 4"]


def test_a_character_may_be_written_as_a_surrogate_pair(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00"}')
    assert [one.body["prompt"] for one in read_log(file)] == ["\U0001f600"]


BAD: list[tuple[str, str]] = [
    ("no json", "line 2 is no JSON: "),
    ("[" * 100_000, "line 2 is no JSON: "),
    ('{"prompt": "\\ud83d"}', "line 2 holds half of a surrogate pair"),
    ('{"prompt": "a", "user": "\\uDEAD"}', "line 2 holds half of a surrogate pair"),
    ("[]", "line 2 must be the body of a completion"),
    ('{"input": "a"}', "line 2 must be the body of a completion"),
    ('{"prompt": "a", "messages": []}', "line 2 must be the body of a completion"),
    ('{"body": "a"}', "line 2 must be the body of a completion"),
    ('{"prompt": "a", "answer": 7}', "line 2: answer must be the text that was generated"),
    ('{"prompt": "a", "timestamp": "now"}', "line 2: timestamp='now' must be a number of seconds"),
    ('{"prompt": "a", "timestamp": NaN}', "line 2: timestamp=nan must be a number of seconds"),
    ('{"prompt": "a", "timestamp": true}', "line 2: timestamp=True must be a number of seconds"),
]


@pytest.mark.parametrize(("line", "why"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(LogError) as refused:
        read_log(file)
    assert str(refused.value).startswith(f"{file}, {why}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("line", "why"), BAD, ids=range(len(BAD)))
def test_a_bad_line_may_be_left_out(line: str, why: str, tmp_path: Path) -> None:
    file, left_out = tmp_path / "log.jsonl", LeftOut(strict=False)
    file.write_text(f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}\n{line}')
    assert [one.body["prompt"] for one in read_log(file, left_out)] == ["a", "b"]
    (found,) = left_out.reasons
    assert (found.requests, found.lines) == (2, [2, 4])
    assert found.reason.startswith(why.removeprefix("line 2").lstrip(": "))


def test_reasons_are_told_apart_by_more_than_values() -> None:
    left_out = LeftOut(strict=False)
    for line in range(1, 10):
        left_out.add(f"log, line {line}", f"'{'x' * line}' has {line} tokens, 5 are allowed")
    left_out.add("log, line 10", "it has no tokens")
    few, other = left_out.reasons
    assert str(few) == "9 requests (lines 1, 2, 3, 4, 5, ...): 'x' has 1 tokens, 5 are allowed"
    assert str(other) == "1 request (line 10): it has no tokens"


def test_a_file_without_requests(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    packed = gzip.compress(b'{"prompt": "a"}\n')
    (tmp_path / "cut.jsonl").write_bytes(packed[:-9])
    (tmp_path / "damaged.jsonl").write_bytes(packed[:10] + b"\xff" + packed[11:])
    for name, why in (
        ("empty.jsonl", "holds no requests"),
        ("binary.jsonl", "cannot read"),
        ("cut.jsonl", "cannot read .*: Compressed file ended"),
        ("damaged.jsonl", "cannot read .*: Error -3"),
        ("none.jsonl", "cannot read"),
    ):
        with pytest.raises(LogError, match=why):
            read_log(tmp_path / name)
