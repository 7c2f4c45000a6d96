# SPDX-License-Identifier: Apache-2.0
"""The file of prompts: what it means, and what it says of a line that means nothing."""

import json
from pathlib import Path

import pytest

from segreuse_tools.calibrate.segmented_prompts import (
    PromptFileError,
    SegmentedPrompt,
    contexts,
    read_texts,
    tokenised,
)

GOOD = {"prefix": "ab", "segments": ["cd", "ef", "gh"], "suffix": "ij"}
LONG = 1000


def write(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    return file


def read(file: Path, bos: int | None = None) -> list[SegmentedPrompt]:
    return tokenised(file, read_texts(file), lambda text: [ord(char) for char in text], bos, LONG)


def test_a_prompt_is_its_parts_in_order(tmp_path):
    first, second = read(write(tmp_path, GOOD, "", {"segments": ["x"], "suffix": "y"}), bos=1)
    assert first.token_ids == [1, *map(ord, "abcdefghij")]
    assert second.token_ids == [1, ord("x"), ord("y")]


def test_other_separators_of_lines_are_text(tmp_path):
    good = json.dumps(GOOD | {"suffix": "i\u2028j"}, ensure_ascii=False)
    first, _ = read(write(tmp_path, good, GOOD))
    assert first.token_ids[-3:] == [*map(ord, "i\u2028j")]


def test_segments_are_computed_in_another_order_behind_another_text(tmp_path):
    prompts = read(write(tmp_path, GOOD, {"prefix": "P", "segments": ["Q", "R"], "suffix": "S"}))
    told = ["".join(map(chr, tokens)) for tokens in contexts(prompts, 0, LONG)]
    assert told == ["PQghcd", "PRef"]
    told = ["".join(map(chr, tokens)) for tokens in contexts(prompts, 1, LONG)]
    assert told == ["abcdQ", "abefR"]


A, B, C = ("".join(chr(first + i) for i in range(40)) for first in (100, 200, 300))


@pytest.mark.parametrize(
    ("others", "own", "told"),
    [
        ([[A]], [A], ["Py" + A]),
        ([[C, A]], [A, B], ["P" + C + A, "P" + C + B]),
        ([[A, C]], [A, B], ["P" + C + A, "P" + C + B]),
        ([[A + "!", C]], [A], ["P" + C + A]),
        ([[C], [A, B]], [A, B], ["P" + C + A, "P" + C + B]),
        ([[A[:15] + "!"]], [A], ["P" + A[:15] + "!" + A]),
        ([[A[:16] + "!"]], [A], ["Py" + A]),
        ([["y"]], [A, "y"], [A[::-1] + A, A[::-1] + "y"]),
    ],
    ids=[
        "alike",
        "last",
        "first",
        "begins-so",
        "further-off",
        "less-than-a-block",
        "a-block",
        "made-up",
    ],
)
def test_contexts_do_not_begin_as_the_prompt_does(tmp_path, others, own, told):
    lines = [{"prefix": "P", "segments": it, "suffix": "y"} for it in others]
    prompts = read(write(tmp_path, *lines, {"prefix": "P", "segments": own, "suffix": "z"}))
    found = contexts(prompts, len(others), LONG)
    assert ["".join(map(chr, tokens)) for tokens in found] == told


@pytest.mark.parametrize(
    ("room", "told"),
    [(9, "wxABC"), (5, "wxABC"), (4, "wxBC"), (3, "wxC"), (2, "wC"), (1, "C")],
)
def test_contexts_are_cut_to_what_the_model_takes(room, told):
    own = SegmentedPrompt([*b"yz"], [[*b"segment"]], [*b"?"])
    prompts = [SegmentedPrompt([*b"wx"], [[*b"ABC"]], [*b"?"]), own]
    [found] = contexts(prompts, 1, len(b"segment") + room + 1)
    assert bytes(found) == told.encode() + b"segment"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ([], "line 2 must be"),
        ({"prompt": "whole"}, "line 2 must be"),
        (GOOD | {"segments": []}, "line 2: segments must be"),
        (GOOD | {"segments": ["", "a"]}, "line 2: segments must be"),
        (GOOD | {"suffix": " "}, "line 2: segments must be"),
        (GOOD | {"prefix": 3}, "line 2: segments must be"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, said):
    with pytest.raises(PromptFileError, match=said):
        read(write(tmp_path, GOOD, line))


def test_one_prompt_is_not_enough(tmp_path):
    with pytest.raises(PromptFileError, match="holds 1 prompts: at least 2"):
        read(write(tmp_path, GOOD))
    with pytest.raises(PromptFileError, match="cannot read"):
        read(tmp_path / "missing.jsonl")


def test_a_prompt_that_is_there_twice_counts_once(tmp_path):
    other = GOOD | {"suffix": "another"}
    assert len(read(write(tmp_path, GOOD, other, GOOD, other))) == 2
    with pytest.raises(PromptFileError, match="holds 1 prompts"):
        read(write(tmp_path, GOOD, GOOD))


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path):
    with pytest.raises(PromptFileError, match="line 2 is no JSON"):
        read(write(tmp_path, GOOD, "[" * 100_000))
