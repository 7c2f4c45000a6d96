# SPDX-License-Identifier: Apache-2.0
"""`make demo ARGS="--model DIR"` without an engine: what is asked, and what is shown of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench import __main__ as bench
from bench.english import demo, engine
from bench.english.arms import Arm
from bench.english.records import Outcome
from bench.english.tasks.base import Example
from tests.bench.english_lab import Words, use_lab

FULL = Outcome(score=1.0, said="Lisbon", ttft_ms=1200.0, tokens=2)
DEFAULT = replace(FULL, said=None, ttft_ms=300.0, work=0.24, reused=1.0, drift=0.5)
SHIFT = replace(FULL, score=0.0, said="Oslo", ttft_ms=100.0, work=0.02, reused=1.0)


class FakeLab:
    """Instead of an engine: notes what is asked, and gives the same answers every time."""

    def __init__(self) -> None:
        self.prompts = Words()
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []
        self.outcomes = {"default": DEFAULT, "shift": SHIFT}
        self.interrupted = False

    def full(self, example: Example) -> engine.Full:
        if self.interrupted:
            raise KeyboardInterrupt
        return engine.Full(FULL, (1, 2), [])

    def reuse(
        self, example: Example, full: engine.Full, donors: str, arms: Sequence[Arm], rng: Random
    ) -> dict[str, Outcome]:
        self.asked.append((example.task, donors, tuple(arm.name for arm in arms)))
        return self.outcomes


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> FakeLab:
    lab = FakeLab()
    use_lab(monkeypatch, lab)
    return lab


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return str(tmp_path)


def test_questions_of_several_tasks_are_asked_of_a_knowledge_base(
    lab: FakeLab, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["demo", f"--model={model}"]) == 0
    assert lab.asked == [(task, "knowledge", ("default", "shift")) for task in demo.TASKS]
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 100] == []
    for number, task in enumerate(demo.TASKS, 1):
        assert f"\n{number}. {task}: " in shown
    assert shown.splitlines()[-1] == (
        "segreuse demo ok: speedup=4.0x work=24% (default, medians); "
        "right of 6: full 6, default 6, shift 0"
    )


def test_a_question_is_shown_with_all_its_answers(lab: FakeLab) -> None:
    (asked,) = demo.converse(lab, 1)  # type: ignore[arg-type]
    example = replace(
        asked.example, documents=("a", "b"), question="In which city?", answers=("Lisbon",)
    )
    assert demo.described(asked._replace(example=example, prompt_tokens=1843)).splitlines() == [
        "one-hop: 2 documents, 1,843 prompt tokens",
        "   In which city?",
        "   Right answer: Lisbon",
        "           " + "     TTFT   work   drift  answer",
        "   full      1200 ms   100%       -  right: Lisbon",
        "   default    300 ms    24%   0.500  right: Lisbon",
        "   shift      100 ms     2%       -  wrong: Oslo",
    ]


def test_more_questions_than_tasks_are_other_examples(lab: FakeLab) -> None:
    count = len(demo.TASKS)
    asked = list(demo.converse(lab, count + 1))  # type: ignore[arg-type]
    first, again = asked[0].example, asked[count].example
    assert (first.task, again.task) == (demo.TASKS[0],) * 2
    assert first.documents != again.documents


@pytest.mark.parametrize("said", ["word " * 60, "x" * 250, "a\x1b[2Jb\n\x00c\u202ed", ""])
def test_any_answer_fits_the_width_and_is_safe_to_print(lab: FakeLab, said: str) -> None:
    lab.outcomes = {"default": replace(DEFAULT, said=said), "shift": SHIFT}
    (asked,) = demo.converse(lab, 1)  # type: ignore[arg-type]
    lines = demo.described(asked).splitlines()
    assert all(len(line) <= 100 and line.isprintable() for line in lines)
    letters = "".join("".join(lines).split("default")[1].split("shift")[0].split())
    wanted = "".join(char for char in said if char.isprintable() and char != " ")
    assert letters.endswith(wanted or "(nothing)")


def test_an_answer_that_is_right_in_part_is_not_right(lab: FakeLab) -> None:
    lab.outcomes = {"default": replace(DEFAULT, score=0.5), "shift": SHIFT}
    asked = list(demo.converse(lab, 2))  # type: ignore[arg-type]
    assert demo.summed_up(asked).endswith("right of 2: full 2, default 0, shift 0")


def test_no_reuse_is_a_failure(
    lab: FakeLab, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.outcomes = {"default": replace(DEFAULT, reused=0.0), "shift": SHIFT}
    assert bench.main(["demo", "--model", model]) == 1
    assert "segreuse demo failed: no document" in capsys.readouterr().err


def test_a_folder_without_a_model_is_one_sentence(
    lab: FakeLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["demo", "--model", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"segreuse demo failed: no model in {tmp_path}")
    assert (printed.err.count("\n"), lab.asked) == (1, [])


def test_an_interrupt_ends_it(lab: FakeLab, model: str) -> None:
    lab.interrupted = True
    assert bench.main(["demo", "--model", model]) == 130


@pytest.mark.parametrize(
    "more", [["--policy", "shift"], ["--json", "out.json"], ["--questions", "0"]]
)
def test_what_does_not_go_with_a_model_is_refused(
    lab: FakeLab, model: str, more: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["demo", "--model", model, *more])
    assert (ended.value.code, lab.asked) == (2, [])
