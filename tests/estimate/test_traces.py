# SPDX-License-Identifier: Apache-2.0
"""Traces of ids: what each format says, and what is said of lines that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.estimate.traces import reading
from segreuse_tools.estimate.traces.formats import Format
from segreuse_tools.estimate.traces.reading import Trace, find_format
from segreuse_tools.estimate.traces.request import Kind, PromptPart, TraceRequest, tokens_of
from tests.estimate import logs

MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}


def ragpulse(time: float, passages: list[int], question: int = 0) -> dict[str, Any]:
    ids = {"sys_prompt": [0], "passages_ids": passages, "user_input": [question]}
    return {"timestamp": str(time), "output_length": 7, "session_id": "s", "hash_ids": ids}


def write_ragpulse(folder: Path, lines: list[Any], passages: int = 9, tokens: int = 60) -> Path:
    """A trace of passages of that many tokens, with the files of its components beside it."""
    for group, count, length in (
        *(("sys_prompt", 2, 40), ("passage", passages, tokens), ("user_input", 50, 9)),
    ):
        sizes = [{f"{group}_id": id, "token_length": length} for id in range(count)]
        logs.write(folder / f"{group}.jsonl", sizes)
    return logs.write(folder / "trace.jsonl", lines)


def write_weka(file: Path, *requests: dict[str, Any], **others: Any) -> Path:
    whole = {"id": file.stem, "block_size": 64, "requests": [*requests], **others}
    return logs.write(file, [whole])


def turn(time: float, tokens: int, ids: list[int]) -> dict[str, Any]:
    return {"t": time, "in": tokens, "out": 3, "hash_ids": ids}


def read(path: Path, **options: Any) -> tuple[list[TraceRequest], LeftOut, LeftOut]:
    left_out = LeftOut(strict=False)
    trace = Trace(path, left_out, **options)
    return [*trace.requests()], left_out, trace.out_of_order


def reasons(left_out: LeftOut) -> list[tuple[int, str]]:
    return [(it.requests, it.reason) for it in left_out.reasons]


def test_components_have_the_lengths_that_files_beside_the_trace_say(tmp_path: Path) -> None:
    file = write_ragpulse(tmp_path, [ragpulse(3, [4, 5], question=1)])
    for path in (file, tmp_path):
        ((request,), left_out, _) = read(path)
        assert reasons(left_out) == []
        assert [part.tokens for part in request.parts] == [40, 60, 60, 9]
        kinds = [Kind.SYSTEM, Kind.PASSAGE, Kind.PASSAGE, Kind.QUESTION]
        assert [part.kind for part in request.parts] == kinds
        assert len({part.id for part in request.parts}) == 4, "groups have ids of their own"
        assert (request.time_s, request.session, request.output_tokens) == (3.0, "s", 7)
        assert request.prompt_tokens == 169
        assert request.documents == [part.id for part in request.parts[1:3]]


def test_ids_of_conversations_are_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_weka(tmp_path / f"{name}.json", turn(0, 130, [1, 2]), turn(5, 192, [1, 2, 3]))
    found, left_out, _ = read(tmp_path)
    assert reasons(left_out) == []
    first, second, other, _ = found
    assert [part.tokens for part in first.parts] == [64, 64, 2]
    assert first.parts[:2] == second.parts[:2]
    assert not {*first.parts} & {*other.parts}
    assert first.parts[2] not in second.parts, "no id stands for the last tokens"
    assert first.session != other.session


@pytest.mark.parametrize(("tokens", "size"), [(1100, 512), (40, 16), (130, 64)])
def test_the_size_of_blocks_is_what_fits(tokens: int, size: int, tmp_path: Path) -> None:
    line = MOONCAKE | {"input_length": tokens}
    ((request,), _, _) = read(logs.write(tmp_path / "t.jsonl", [line]))
    assert [part.tokens for part in request.parts] == [size, size, tokens - 2 * size]


def test_a_size_that_is_given_is_taken(tmp_path: Path) -> None:
    line = MOONCAKE | {"input_length": 60, "hash_ids": [1, 2]}
    ((request,), _, _) = read(logs.write(tmp_path / "t.jsonl", [line]), block_tokens=40)
    assert [part.tokens for part in request.parts] == [40, 20]


def test_compressed_files_are_read_by_their_content(tmp_path: Path) -> None:
    file = tmp_path / "named-otherwise.jsonl"
    file.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode()))
    assert len(read(file)[0]) == 1


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (MOONCAKE, Format.HASH_IDS),
        (ragpulse(0, [1]), Format.RAGPULSE),
        ({"id": "a", "block_size": 64, "requests": []}, Format.WEKA),
        ({"prompt": "a"}, Format.BODIES),
        (
            {"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": []}},
            Format.BODIES,
        ),
        ({"input": "a"}, None),
        ([], None),
    ],
)
def test_formats_are_told_by_their_content(line: Any, found: Format | None, tmp_path: Path) -> None:
    file = logs.write(tmp_path / "x.jsonl", [line])
    file.write_text("damaged\n\n" + file.read_text())
    assert find_format(file) is found


BAD: list[tuple[Any, str]] = [
    ("{", "it is no JSON"),
    ({"prompt": "a"}, "is no line of a trace of hash ids"),
    (MOONCAKE | {"hash_ids": None}, "hash_ids must be a list of ids"),
    (MOONCAKE | {"hash_ids": [-1, 2, 3]}, "hash_ids must be a list of ids"),
    (MOONCAKE | {"hash_ids": [1, 2]}, "2 hash_ids for input_length=1100 are no blocks of 512"),
    (MOONCAKE | {"input_length": None}, "input_length=None must be a number of tokens from 1 on"),
    (MOONCAKE | {"input_length": -3}, "input_length=-3 must be a number of tokens from 1 on"),
    (MOONCAKE | {"output_length": "x"}, "output_length='x' must be a number of tokens"),
    (MOONCAKE | {"timestamp": "noon"}, "the time 'noon' must be a number"),
    (MOONCAKE | {"timestamp": float("nan")}, "the time nan must be a number"),
]


@pytest.mark.parametrize(("line", "why"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_and_counted(line: Any, why: str, tmp_path: Path) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    file = logs.write(tmp_path / "t.jsonl", [MOONCAKE])
    file.write_text(f"{file.read_text()}{text}\n{file.read_text()}")
    found, left_out, _ = read(file)
    assert len(found) == 2
    (reason,) = left_out.reasons
    assert (reason.requests, reason.lines) == (1, [2])
    assert why.removeprefix("it ") in reason.reason
    with pytest.raises(LogError, match="line 2"):
        [*Trace(file, LeftOut(strict=True)).requests()]


def test_a_component_without_a_length_is_named(tmp_path: Path) -> None:
    write_ragpulse(tmp_path, [ragpulse(0, [1]), ragpulse(1, [99]), ragpulse(2, [2])])
    found, left_out, _ = read(tmp_path)
    assert len(found) == 2
    assert reasons(left_out) == [(1, "no file beside it has the length of passage 99")]


def test_a_bad_request_of_a_conversation_is_named(tmp_path: Path) -> None:
    turns = [turn(9, 64, [1]), turn(3, 64, [1]), {"t": 9, "in": 5}, turn(10, 64, [1])]
    found, left_out, _ = read(write_weka(tmp_path / "c.json", *turns))
    assert len(found) == 2
    assert {why for _, why in reasons(left_out)} == {
        "t=3.0 is before that of the one in front (of the conversation c)",
        "has no hash_ids (of the conversation c)",
    }
    wrong = write_weka(tmp_path / "d.json", turn(0, 64, [1]), block_size="x")
    assert reasons(read(wrong)[1]) == [(1, "block_size='x' must be a number of tokens")]


def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl.gz"
    lines = [
        MOONCAKE | {"timestamp": 13 * i % 97, "hash_ids": [i, i * i, 7 * i]} for i in range(5000)
    ]
    packed = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    file.write_bytes(packed[: len(packed) // 2])
    found, left_out, _ = read(file)
    assert 100 < len(found) < 5000
    assert any("the compressed file is cut off" in why for _, why in reasons(left_out))


def test_times_that_run_backwards_are_sorted_and_counted(tmp_path: Path) -> None:
    times = [5, 6, 1, 7, 2]
    file = logs.write(tmp_path / "t.jsonl", [MOONCAKE | {"timestamp": it} for it in times])
    found, left_out, out_of_order = read(file)
    assert [request.time_s for request in found] == [1, 2, 5, 6, 7]
    assert reasons(left_out) == []
    ((count, why),) = reasons(out_of_order)
    assert (count, why) == (2, "its time is before that of a line in front of it")
    with pytest.raises(LogError, match="line 3: its time is before"):
        [*Trace(file, LeftOut(strict=True)).requests()]


@pytest.mark.parametrize(("bound", "most"), [("MOST_SORTED", 3), ("MOST_SORTED_PARTS", 9)])
def test_so_many_are_held_back_as_memory_is_given(
    bound: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of three parts are handed on before the file has been read."""
    monkeypatch.setattr(reading, bound, most)
    times = [*range(10, 20), 1]
    file = logs.write(tmp_path / "t.jsonl", [MOONCAKE | {"timestamp": it} for it in times])
    trace, handed_on = Trace(file, LeftOut(strict=False)), []
    parsed, read_lines = trace.lines.parsed, []

    def counted(left_out: LeftOut) -> Any:
        for line in parsed(left_out):
            read_lines.append(line)
            yield line

    monkeypatch.setattr(trace.lines, "parsed", counted)
    for request in trace.requests():
        handed_on.append(request.time_s)
        assert len(read_lines) - len(handed_on) <= 3
    assert handed_on == [*range(10, 18), 1, 18, 19] or handed_on == [*range(10, 17), 1, 17, 18, 19]
    assert reasons(trace.out_of_order) == [(1, "its time runs back too far to be sorted")]


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="is no trace of ids"):
        Trace(logs.write(tmp_path / "a.jsonl", [{"prompt": "a"}]), LeftOut())
    with pytest.raises(LogError, match="cannot read"):
        find_format(tmp_path / "none.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(LogError, match="holds no file whose name ends with"):
        find_format(tmp_path / "folder")


def test_equal_parts_are_equal_tokens_and_others_share_none() -> None:
    a, b = PromptPart(1, 50), PromptPart(2, 50)
    tokens = tokens_of((a, b, a))
    assert tokens.shape == (150,)
    assert tokens.min() >= 0
    assert (tokens[:50] == tokens[100:]).all()
    assert len({*tokens.tolist()}) == 100
