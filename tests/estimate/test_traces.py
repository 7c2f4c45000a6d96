# SPDX-License-Identifier: Apache-2.0
"""Traces of ids: what each format says, and what is said of lines that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.estimate.traces import lines as log_lines
from segreuse_tools.estimate.traces import reading
from segreuse_tools.estimate.traces.formats import Format
from segreuse_tools.estimate.traces.lines import LogLines
from segreuse_tools.estimate.traces.reading import Trace, find_format
from segreuse_tools.estimate.traces.request import (
    Kind,
    PromptPart,
    TraceRequest,
    mixed_ids,
    tokens_of,
)
from segreuse_tools.estimate.traces.writing import HashIdFile, blocks_of
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
    assert [request.parts[2].id >> 62 for request in (first, other)] == [1, 1], "below 2**63"
    assert first.parts[2].id != other.parts[2].id
    assert first.session != other.session == "b"
    assert (second.time_s, second.output_tokens) == (5.0, 3)


@pytest.mark.parametrize(
    ("tokens", "ids", "expected"),
    [
        (128, [1, 2], [64, 64]),
        (129, [1, 2, 3], [64, 64, 1]),
        (127, [1, 2], [64, 63]),
        (100, [1, 2, 3], [64, 36]),
        (300, [1], [64, 236]),
        (300, [], [300]),
    ],
)
def test_ids_of_a_conversation_are_blocks_from_its_beginning(
    tokens: int, ids: list[int], expected: list[int], tmp_path: Path
) -> None:
    ((request,), left_out, _) = read(write_weka(tmp_path / "c.json", turn(0, tokens, ids)))
    assert reasons(left_out) == []
    assert [part.tokens for part in request.parts] == expected


def test_ids_of_a_conversation_may_be_as_large_as_any(tmp_path: Path) -> None:
    largest = (1 << 62) - 1
    file = write_weka(tmp_path / "c.json", turn(0, 128, [0, largest]), turn(0, 64, [0]))
    ((first, second), left_out, _) = read(file)
    assert reasons(left_out) == []
    assert first.parts[0] == second.parts[0]
    assert all(0 <= part.id < 1 << 62 for part in first.parts), "below those of no id"


@pytest.mark.parametrize(("tokens", "size"), [(1100, 512), (40, 16), (130, 64)])
def test_the_size_of_blocks_is_what_fits(tokens: int, size: int, tmp_path: Path) -> None:
    line = MOONCAKE | {"input_length": tokens}
    ((request,), _, _) = read(logs.write(tmp_path / "t.jsonl", [line]))
    assert [part.tokens for part in request.parts] == [size, size, tokens - 2 * size]


@pytest.mark.parametrize(
    ("tokens", "ids", "expected"),
    [
        (1100, 8, [512, 512, 76]),  # that many blocks have no size: it is Mooncake's
        (512, 1, [512]),
        (4000, 1, [4000]),
        (8192, 2, [4096, 4096]),
        (8193, 2, [512, 512, 7169]),
        (48, 3, [16, 16, 16]),
    ],
)
def test_a_size_is_found_for_as_many_ids_as_there_are(
    tokens: int, ids: int, expected: list[int], tmp_path: Path
) -> None:
    line = MOONCAKE | {"input_length": tokens, "hash_ids": [*range(ids)]}
    ((request,), _, _) = read(logs.write(tmp_path / "t.jsonl", [line]))
    assert [part.tokens for part in request.parts] == expected


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


@pytest.mark.parametrize(("number", "found"), [(99, Format.HASH_IDS), (100, None)])
def test_a_hundred_lines_are_tried(number: int, found: Format | None, tmp_path: Path) -> None:
    assert find_format(logs.write(tmp_path / "x.jsonl", [[]] * number + [MOONCAKE])) is found


@pytest.mark.parametrize(
    "others",
    [
        {"input_length": (1 << 31) - 1},
        {"output_length": (1 << 31) - 1},
        {"output_length": 0},
        {"hash_ids": [0, 1, (1 << 62) - 1]},
        {"timestamp": 0},
        {"timestamp": "-1.5"},
        {"session_id": 7},
    ],
    ids=str,
)
def test_the_largest_and_the_smallest_values_are_read(
    others: dict[str, Any], tmp_path: Path
) -> None:
    found, left_out, _ = read(
        logs.write(tmp_path / "t.jsonl", [MOONCAKE | others]), block_tokens=None
    )
    assert (len(found), reasons(left_out)) == (1, [])


def test_what_a_line_does_not_say_is_not_known(tmp_path: Path) -> None:
    lines = [{"input_length": 1100, "hash_ids": [1, 2, 3]}]
    lines += [MOONCAKE | {"session_id": session} for session in (7, "")]
    (first, second, third), *_ = read(logs.write(tmp_path / "t.jsonl", lines))
    assert third.session is None
    assert (first.output_tokens, first.time_s, first.session) == (0, None, None)
    assert (second.output_tokens, second.time_s, second.session) == (5, 0.0, "7")


BAD: list[tuple[Any, str]] = [
    ("{", "it is no JSON"),
    ({"prompt": "a"}, "is no line of a trace of hash ids"),
    (MOONCAKE | {"hash_ids": None}, "hash_ids must be a list of ids"),
    (MOONCAKE | {"hash_ids": [-1, 2, 3]}, "hash_ids must be a list of ids"),
    (MOONCAKE | {"hash_ids": [1, 2]}, "2 hash_ids for input_length=1100 are no blocks of 512"),
    (MOONCAKE | {"input_length": None}, "input_length=None must be a number of tokens from 1 on"),
    (
        MOONCAKE | {"hash_ids": [1, 2, 1 << 62]},
        "hash_ids must be a list of ids from 0 to 2**62 - 1",
    ),
    (MOONCAKE | {"input_length": 0}, "input_length=0 must be a number of tokens from 1 on"),
    (MOONCAKE | {"input_length": 1 << 31}, "input_length=2147483648 must be a number of tokens"),
    (MOONCAKE | {"output_length": -1}, "output_length=-1 must be a number of tokens from 0 on"),
    (MOONCAKE | {"session_id": "\ud83d"}, "holds half of a surrogate pair"),
    (MOONCAKE | {"timestamp": True}, "the time True must be a number"),
    (MOONCAKE | {"timestamp": [1]}, "the time [1] must be a number"),
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


def test_components_without_tokens_are_left_out(tmp_path: Path) -> None:
    trace = write_ragpulse(tmp_path, [ragpulse(0, [1, 100]), {"hash_ids": {"passages_ids": [100]}}])
    logs.write(tmp_path / "more.jsonl", [{"passage_id": 100, "token_length": 0}])
    found, left_out, _ = read(trace)
    assert [[part.tokens for part in request.parts] for request in found] == [[40, 60, 9]]
    assert reasons(left_out) == [(1, "has no tokens")]


def test_groups_that_are_not_known_are_blocks(tmp_path: Path) -> None:
    line = {"hash_ids": {"tools_ids": [3], "web_search": [4], "history": [5]}}
    trace = write_ragpulse(tmp_path, [line])
    for group, id in (("tool", 3), ("web_search", 4), ("history", 5)):
        logs.write(tmp_path / f"{group}.jsonl", [{f"{group}_id": id, "token_length": 7}])
    ((request,), left_out, _) = read(trace)
    assert reasons(left_out) == []
    assert [part.kind for part in request.parts] == [Kind.BLOCK, Kind.SEARCH, Kind.HISTORY]


def test_bad_lines_of_components_are_named(tmp_path: Path) -> None:
    trace = write_ragpulse(tmp_path, [ragpulse(0, [1])])
    good = {"passage_id": 1, "token_length": 60}
    bad: list[Any] = [
        good | {"text": "a"},
        {"passage_id": 1},
        {"passage": 1, "token_length": 60},
        {"passage_id": -1, "token_length": 60},
        {"passage_id": 1, "token_length": -60},
        [],
    ]
    logs.write(tmp_path / "more.jsonl", [good, *bad, good | {"token_length": 61}])
    found, left_out, _ = read(trace)
    assert [part.tokens for part in found[0].parts] == [40, 60, 9], "what was said first"
    assert reasons(left_out) == [
        (6, "has no id with its token_length"),
        (1, "passage 1 had another token_length"),
    ]


def test_a_bad_request_of_a_conversation_is_named(tmp_path: Path) -> None:
    turns = [turn(9, 64, [1]), turn(3, 64, [1]), {"t": 9, "in": 5}, turn(10, 64, [1])]
    found, left_out, _ = read(write_weka(tmp_path / "c.json", *turns))
    assert len(found) == 2
    assert {why for _, why in reasons(left_out)} == {
        "t=3.0 is before that of the one in front (request 2 of the conversation 'c')",
        "has no hash_ids (request 3 of the conversation 'c')",
    }
    assert [reason.lines for reason in left_out.reasons] == [[1], [1]], "both are in one line"
    wrong = write_weka(tmp_path / "d.json", turn(0, 64, [1]), block_size="x")
    assert reasons(read(wrong)[1]) == [(1, "block_size='x' must be a number of tokens")]
    wrong = write_weka(tmp_path / "e.json", turn(0, 64, [1]), block_size=0)
    assert reasons(read(wrong)[1]) == [(1, "block_size=0 must be a number of tokens")]


def test_bad_requests_of_several_conversations_are_counted_by_the_reason(tmp_path: Path) -> None:
    for name in ("ab", "cd"):
        write_weka(tmp_path / f"{name}.json", turn(0, 64, [1]), {"in": 5}, id=name)
    found, left_out, _ = read(tmp_path)
    assert len(found) == 2
    assert reasons(left_out) == [(2, "has no hash_ids (request 2 of the conversation 'ab')")]


def test_requests_of_a_conversation_may_have_one_time_or_none(tmp_path: Path) -> None:
    turns = [turn(9, 64, [1]), {"in": 64, "hash_ids": [1]}, turn(9, 64, [1]), turn(8, 64, [1])]
    found, left_out, _ = read(write_weka(tmp_path / "c.json", *turns))
    assert [request.time_s for request in found] == [9, None, 9]
    why = "t=8.0 is before that of the one in front (request 4 of the conversation 'c')"
    assert reasons(left_out) == [(1, why)]


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


@pytest.mark.parametrize("most", [1, 2, 100])
def test_equal_times_do_not_run_backwards(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_SORTED", most)
    lines = [MOONCAKE | {"timestamp": 5, "output_length": number} for number in range(4)]
    found, _, out_of_order = read(logs.write(tmp_path / "t.jsonl", lines))
    assert [request.output_tokens for request in found] == [0, 1, 2, 3]
    assert reasons(out_of_order) == []


@pytest.mark.parametrize(
    ("bound", "most", "held"),
    [
        *(("MOST_SORTED", 3, 3), ("MOST_SORTED_PARTS", 9, 3), ("MOST_SORTED_PARTS", 8, 2)),
        *(("MOST_SORTED_PARTS", 3, 1), ("MOST_SORTED_PARTS", 2, 1)),
    ],
)
def test_so_many_are_held_back_as_memory_is_given(
    bound: str, most: int, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        if len(read_lines) < len(times):
            assert len(read_lines) - len(handed_on) == held
    assert handed_on == [*range(10, 20 - held), 1, *range(20 - held, 20)]
    assert reasons(trace.out_of_order) == [(1, "its time runs back too far to be sorted")]


def test_how_much_has_been_read_is_known(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("[1]\n\n[2]\n")
    files[1].write_text("[3]\n[40]\n")
    lines = LogLines(files)
    assert (lines.total_bytes, lines.read_bytes) == (18, 0)
    found = [(where, value, lines.read_bytes) for where, value in lines.parsed(LeftOut())]
    assert found == [
        (f"{files[0]}, line 1", [1], 4),
        (f"{files[0]}, line 3", [2], 9),
        (f"{files[1]}, line 1", [3], 13),
        (f"{files[1]}, line 2", [40], 18),
    ]
    assert lines.read_bytes == 18
    with pytest.raises(LogError, match=r"cannot read .*none: No such file"):
        LogLines([tmp_path / "none"])


@pytest.mark.parametrize(("most", "count"), [(8, 2), (7, 1)])
def test_a_line_is_read_as_far_as_memory_is_given(
    most: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "MOST_LINE_BYTES", most)
    (file := tmp_path / "a.jsonl").write_text("[1]\n[23456]\n")
    left_out = LeftOut(strict=False)
    assert len([*LogLines([file]).parsed(left_out)]) == count
    assert reasons(left_out) == [(1, f"has more than {most} bytes")] * (2 - count)


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="is no trace of ids"):
        Trace(logs.write(tmp_path / "a.jsonl", [{"prompt": "a"}]), LeftOut())
    with pytest.raises(LogError, match="cannot read"):
        find_format(tmp_path / "none.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(LogError, match="holds no file whose name ends with"):
        find_format(tmp_path / "folder")


def test_a_trace_that_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(LogError, match=r"^cannot read a+: File name too long$"):
        find_format(Path("a" * 300))
    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(LogError, match=f"^cannot read {tmp_path}: Permission denied$"):
        find_format(tmp_path)


def test_equal_parts_are_equal_tokens_and_others_share_none() -> None:
    a, b = PromptPart(1, 50), PromptPart(2, 50)
    tokens = tokens_of((a, b, a))
    assert tokens.shape == (150,)
    assert tokens.min() >= 0
    assert (tokens[:50] == tokens[100:]).all()
    assert len({*tokens.tolist()}) == 100


def test_tokens_are_those_of_splitmix64() -> None:
    """Published numbers of its sequence from 0: what is written means the same anywhere."""
    places = np.arange(4, dtype=np.uint64)
    expected = [0, 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mixed_ids(np.zeros(4, np.uint64), places).tolist() == expected
    assert tokens_of((PromptPart(0, 4),)).tolist() == [it >> 33 for it in expected]
    assert mixed_ids(np.ones(1, np.uint64), places[:1]).tolist() != expected[:1]


def test_blocks_that_are_written_are_ids_of_53_bits() -> None:
    ids = blocks_of((PromptPart(0, 64), PromptPart(7, 1)), 16)
    expected = [0, 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert ids[:4] == [it >> 11 for it in expected]
    assert blocks_of((PromptPart(7, 1),), 16) == ids[4:]


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (23, 1), (25, 2), (39, 2), (41, 3)])
def test_parts_are_rounded_to_whole_blocks(tokens: int, count: int) -> None:
    assert len(blocks_of((PromptPart(7, tokens),), 16)) == count


def test_lines_that_are_written(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    part = PromptPart(0, 16)
    with HashIdFile(file, 16) as out:
        for time in (None, 5.0, 5.25, 5.25, 3.0, None, 4.0):
            out.write((part,), 7, time)
        out.write((part, part), 0, 4.0006)
    written = file.read_text().splitlines()
    times = [json.loads(line)["timestamp"] for line in written]
    assert times == [0, 0, 250, 250, 250, 250, 1250, 1251]
    assert written[0] == '{"timestamp":0,"input_length":16,"output_length":7,"hash_ids":[0]}'
    assert written[7] == '{"timestamp":1251,"input_length":32,"output_length":1,"hash_ids":[0,0]}'
