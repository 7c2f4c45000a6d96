# SPDX-License-Identifier: Apache-2.0
"""Conversations whose context is edited: what is asked, and what becomes of the answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from bench.agents.tokens import Tokens
from bench.edits import command, resting, serving
from bench.edits.arms import ARMS
from bench.edits.conversations import LATER_TURNS, Conversation, draw, results
from bench.edits.distance import divergence
from bench.edits.edits import CUT, EDITS
from bench.edits.figures import result_of
from bench.edits.kept import Kept
from bench.edits.resting import Rested
from bench.edits.serving import Asked
from bench.edits.writing import Writer
from bench.harness import BenchError
from bench.records import RecordsError

STEPS = 6


def tokenizer(text: str, add_special_tokens: bool = False) -> Any:
    """A character is a token."""
    return SimpleNamespace(input_ids=[ord(character) for character in text])


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(tokenizer)


@pytest.fixture(scope="module")
def conversation(writer: Writer) -> Conversation:
    return draw(Random(3), 0, STEPS, lambda text: len(text) // 4)


def shared(one: str, other: str, backwards: bool = False) -> int:
    """Characters at the beginning, or at the end, that are equal."""
    pairs = zip(reversed(one), reversed(other)) if backwards else zip(one, other)  # noqa: B905
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_a_draw_can_be_repeated(conversation: Conversation) -> None:
    assert draw(Random(3), 0, STEPS, lambda text: len(text) // 4) == conversation
    assert draw(Random(4), 0, STEPS, lambda text: len(text) // 4) != conversation
    assert len(results(conversation.loop)) == STEPS


def test_answers_are_in_the_later_results_of_tools(conversation: Conversation) -> None:
    places = results(conversation.loop)[STEPS // 2 :]
    later = " ".join(str(conversation.loop[place]["content"]) for place in places)
    assert len(conversation.questions) == LATER_TURNS + 2
    for question in conversation.questions:
        title = question.text.removeprefix("How many euros does the ").partition(" cost")[0]
        assert question.answer == f"The {title} costs {question.right} euros."
        assert question.answer.removesuffix(".") in later
    assert conversation.questions[0] != conversation.questions[-1]


def test_thoughts_are_dropped_once_the_user_has_spoken(
    conversation: Conversation, writer: Writer
) -> None:
    *_, whole = (conversation.loop[: end + 1] for end in results(conversation.loop))
    assert writer.text(conversation, whole, False).count("<think>") == STEPS
    assert "<think>" not in writer.text(conversation, conversation.asked(2), False)
    kept = writer.text(conversation, conversation.asked(2), True)
    assert kept.count("<think>") == STEPS + 3  # the loop's end, and two answers
    assert kept.endswith(f"{conversation.questions[2].text}<|im_end|>\n<|im_start|>assistant\n")
    for tool in conversation.tools:
        assert f'"name": "{tool["name"]}"' in kept


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_breaks_the_prefix_and_leaves_what_is_behind_it(
    name: str, conversation: Conversation, writer: Writer
) -> None:
    edit = EDITS[name]
    after = edit.change(conversation, Random(5))
    before = writer.text(conversation, conversation.asked(0), True)
    asked = writer.text(after, after.asked(0), edit.keeps_thoughts)
    assert shared(before, asked) < len(asked) * 0.9 or name == "retried"
    last = str(conversation.loop[results(conversation.loop)[-1]]["content"])
    assert last in asked
    if name == "retried":
        assert edit.retries
        question = asked.rpartition("<|im_start|>user\n")[2]
        assert question.startswith(conversation.questions[-1].text)
    elif name != "thoughts":  # these are everywhere
        assert shared(before, asked, backwards=True) > len(last)
    assert edit.change(conversation, Random(5)) == after


def test_half_of_the_results_are_cut_and_a_third_of_the_steps_compacted(
    conversation: Conversation,
) -> None:
    cut = EDITS["results"].change(conversation, Random(0)).loop
    assert [cut[place]["content"] == CUT for place in results(cut)] == [True] * 3 + [False] * 3
    compacted = EDITS["compacted"].change(conversation, Random(0)).loop
    assert len(results(compacted)) == STEPS - STEPS // 3
    assert compacted[-1] == conversation.loop[-1]
    fewer = EDITS["tools"].change(conversation, Random(0)).tools
    assert len(fewer) == len(conversation.tools) - 1


def test_prompts_of_the_loop_only_grow(conversation: Conversation, writer: Writer) -> None:
    prompts = writer.history(conversation, keeps_thoughts=False)
    assert len(prompts) == STEPS + 1
    for earlier, later in pairwise(prompts):
        # But for the header of the answer, which is another text in the later one.
        assert later[: len(earlier) - len("assistant\n")] == earlier[: -len("assistant\n")]


def test_a_turn_ends_with_the_beginning_of_its_answer(
    conversation: Conversation, writer: Writer
) -> None:
    asked = "".join(map(chr, writer.turn(conversation, 2, False)))
    question = conversation.questions[2]
    assert asked.endswith(f"{question.text}<|im_end|>\n<|im_start|>assistant\n{question.begun}")
    earlier = conversation.questions[1]
    assert f"<|im_start|>assistant\n{earlier.answer}<|im_end|>" in asked


def asked(
    arm: str,
    number: int,
    turn: int,
    ttft_s: float,
    likely: float = 0.5,
    is_right: bool = True,
    **tokens: Any,
) -> Asked:
    likeliest = {"a": log(likely), "b": log(1 - likely)} if turn == 0 else {}
    read = Tokens(**tokens)
    return Asked("date", number, arm, turn, ttft_s, is_right, arm, read, likeliest)


@pytest.mark.parametrize(
    ("full", "mine", "apart"),
    [
        ({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5}, 0.0),
        ({"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}, 0.5 * log(2) + 0.5 * log(2 / 3)),
        # Half of both is not told, and neither is b of one: .7 against .4 are others.
        ({"a": 0.3, "b": 0.2}, {"a": 0.6, "c": 0.1}, 0.3 * log(1 / 2) + 0.7 * log(7 / 4)),
        ({"a": 1.0}, {"a": 0.5, "b": 0.5}, log(2)),
    ],
)
def test_the_divergence_is_over_tokens_that_both_name(
    full: dict[str, float], mine: dict[str, float], apart: float
) -> None:
    logarithms = [{token: log(p) for token, p in of.items()} for of in (full, mine)]
    assert divergence(logarithms[0], logarithms[1]) == pytest.approx(apart)


def test_figures_compare_each_conversation_with_the_prefix_cache() -> None:
    found = []
    for number, slower in enumerate((1.0, 2.0, 4.0)):
        full = {"prompt": 100, "prefix": 20, "computed": 80.0}
        moved = {"prompt": 100, "prefix": 20, "equal": 70, "computed": 8.0}
        found += [
            asked("none", number, 0, 9.0, prompt=100, computed=100.0),
            asked("none", number, 1, 9.0, prompt=100, computed=100.0),
            asked("prefix", number, 0, slower, **full),
            asked("prefix", number, 1, slower, **full),
            asked("once", number, 0, slower / 4, (0.5, 0.125, 0.25)[number], **moved),
            asked("once", number, 1, slower / 2, is_right=number > 0, **moved),
            asked("shift", number, 0, slower / 8, **moved),
        ]
    result = result_of(found, "once")
    row = next(row for row in result["rows"] if row["arm"] == "once")
    assert row["at_ttft_over_prefix"] == 0.25
    assert row["later_ttft_over_prefix"] == 0.5
    assert row["at_work"] == 0.1
    assert row["at_known_share"] == 0.9
    far = 0.5 * log(4) + 0.5 * log(4 / 7)
    assert row["at_kl_p90"] == pytest.approx(far)
    assert row["at_kl_p50"] == pytest.approx(0.5 * log(2) + 0.5 * log(2 / 3))
    assert row["at_agreement"] == 0
    assert (row["at_right"], row["later_right"]) == (1.0, pytest.approx(2 / 3))
    assert 0.5 <= row["right_over_full_low"] < 0.8 < row["right_over_full_high"] <= 1
    assert result["summary"] == {
        "arm": "once",
        "date_ttft_over_prefix": 0.25,
        "date_work": 0.1,
        "date_later_ttft_over_prefix": 0.5,
        "date_right_over_full": pytest.approx(5 / 6),
        "date_kl_p90": pytest.approx(far),
    }


def test_healing_is_compared_with_none() -> None:
    rested = [
        Rested(heals, number, 100, 96 if heals else 40, 1.0 - 0.5 * heals, (1.0, 2.0 + heals))
        for heals in (False, True)
        for number in range(50)
    ]
    summary = resting.result_of(rested)["summary"]
    assert summary["healed_prefix_share"] == pytest.approx(0.96)
    assert summary["next_ttft_over_unhealed"] == 0.5
    assert summary["others_p99_over_unhealed"] == 1.5
    assert summary["others_p99_over_unhealed_low"] == 1.5
    with pytest.raises(BenchError, match="with and without healing"):
        resting.result_of(rested[:50])


def test_what_was_not_measured_has_no_figures() -> None:
    result = result_of([asked("once", 0, 0, 1.0, prompt=10, computed=10.0)], "once")
    assert result["summary"]["date_right_over_full"] is None
    assert result["summary"]["date_ttft_over_prefix"] is None
    assert result["rows"][0]["later_ttft_s"] is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--edits", "thoughts,typo"], "no 'typo'; there are thoughts, results, tools"),
        (["--arms", "fast"], "no 'fast'; there are none, prefix, shift"),
    ],
)
def test_what_is_not_there_is_named(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--model", str(tmp_path), *given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--model", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_arms_without_the_prefix_cache_share_nothing() -> None:
    none, prefix = ARMS["none"], ARMS["prefix"]
    assert none.body("space", 1) != none.body("space", 2)
    assert prefix.body("space", 1) == prefix.body("space", 2)


SETTING = {"model": "small", "arms": ["prefix", "once"]}


def test_a_run_goes_on_behind_the_conversations_that_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "edits.jsonl"
    first = Kept(file, SETTING, "abc")
    mine = [asked("once", 4, turn, 0.5, prompt=90, computed=1.5) for turn in range(2)]
    first.add(4, mine)
    again = Kept(file, SETTING, "abc")
    assert again.asked == mine
    assert again.conversations == {4}
    again.add(5, mine[:1])
    assert Kept(file, SETTING, "abc").conversations == {4, 5}


@pytest.mark.parametrize(
    ("setting", "commit", "message"),
    [
        ({**SETTING, "model": "large"}, "abc", "model small, not large"),
        (SETTING, "def", "commit abc, this is def"),
    ],
)
def test_conversations_of_another_run_are_refused(
    tmp_path: Path, setting: dict[str, Any], commit: str, message: str
) -> None:
    file = tmp_path / "edits.jsonl"
    Kept(file, SETTING, "abc").add(0, [asked("once", 0, 0, 0.5)])
    with pytest.raises(RecordsError, match=message):
        Kept(file, setting, commit)


def test_a_line_that_is_no_conversation_is_named(tmp_path: Path) -> None:
    file = tmp_path / "edits.jsonl"
    Kept(file, SETTING, "abc")
    with file.open("a") as out:
        out.write('{"conversation": 0}\n')
    with pytest.raises(RecordsError, match="line 2"):
        Kept(file, SETTING, "abc")


class Served:
    """Stands for a server's client: answers everything, and is interrupted after some."""

    def __init__(self, left: int) -> None:
        self.left, self.numbers = left, list[int]()

    def reset(self) -> None:
        pass

    def conversation(self, before: Conversation, edit: Any, arm: Any) -> list[Asked]:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.numbers.append(before.number)
        one = asked(arm.name, before.number, 0, 0.5, prompt=90, computed=9)
        return [replace(one, edit=edit.name, turn=turn) for turn in range(2)]


def test_an_interrupted_run_reports_whole_conversations_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Writer
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: tokenizer)
    file = tmp_path / "out.json"
    given = ["--model", str(tmp_path), "--conversations", "3", "--edits", "date", "--steps", "4"]
    given += ["--arms", "prefix,once", "--json", str(file)]

    def run(left: int) -> tuple[int, Served]:
        served = Served(left)

        @contextmanager
        def asking(*_: Any) -> Iterator[Served]:
            yield served

        monkeypatch.setattr(serving, "asking", asking)
        return command.main(given), served

    status, _ = run(1 + 2 + 1)  # the first is not counted; one whole conversation, half of another
    assert status == 130
    rows = json.loads(file.read_text())["rows"]
    assert {row["conversations"] for row in rows if "conversations" in row} == {1}
    status, served = run(99)
    assert status == 0
    assert served.numbers == [1, 1, 1, 2, 2]
    rows = json.loads(file.read_text())["rows"]
    assert {row["conversations"] for row in rows if "conversations" in row} == {3}
    status, served = run(99)
    assert (status, served.numbers) == (0, [])
