# SPDX-License-Identifier: Apache-2.0
"""`bench english` without an engine: what is asked, kept, gone on with, and what it comes to."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from bench import __main__ as bench
from bench import harness
from bench.english import engine, figures, page, pooling, run
from bench.english.arms import Arm, arm
from bench.english.donors import DONORS
from bench.english.records import Outcome, Record, Records, Setting, model_digest
from bench.english.tape import Tape, divergences, favourites, tape_of
from bench.english.tasks import draw
from bench.english.tasks.base import Example
from bench.quality import seeds, statistics
from bench.records import RecordsError
from tests.bench.english_lab import Words, use_lab

SETTING = Setting("small", "0123", "reporting", "1", "4567")
FULL = Outcome(score=1.0, said="4821", ttft_ms=1000.0, tokens=8)


def outcome(score: float = 1.0, **fields: Any) -> Outcome:
    same = {"said": None, "ttft_ms": 200.0, "tokens": 8, "work": 0.2, "reused": 1.0}
    return Outcome(score=score, **{**same, **fields})


def record(
    number: int = 0,
    task: str = "one-hop",
    donors: str = "alone",
    full: float = 1.0,
    kind: str = "",
    **arms: Outcome,
) -> Record:
    return Record(task, kind, number, donors, 4, 500, "abc", replace(FULL, score=full), dict(arms))


class FakeLab:
    """In the place of an engine: notes what it is asked, and answers everything right."""

    def __init__(self) -> None:
        self.prompts = Words()
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []
        self.drawn: list[Example] = []
        self.interrupt_after: int | None = None
        self.answer = FULL

    def full(self, example: Example) -> engine.Full:
        self.drawn.append(example)
        return engine.Full(self.answer, (1, 2), [])

    def reuse(
        self,
        example: Example,
        full: engine.Full,
        donors: str,
        arms: Sequence[Arm],
        rng: Random,
    ) -> dict[str, Outcome]:
        if len(self.asked) == self.interrupt_after:
            raise KeyboardInterrupt
        self.asked.append((example.task, donors, tuple(one.name for one in arms)))
        return {one.name: outcome() for one in arms}


def load(samples: int = 2, arms: Sequence[str] = ("default", "shift")) -> run.Load:
    return run.Load(
        ("one-hop", "logs"), ("alone", "stream"), tuple(map(arm, arms)), samples, "tuning"
    )


def ask(lab: FakeLab, what: run.Load, records: Records) -> bool:
    return run.measure(lab, what, records, "abc")  # type: ignore[arg-type]


def test_every_example_is_asked_once_under_every_kind_of_donors() -> None:
    lab, records = FakeLab(), Records(SETTING)
    assert ask(lab, load(), records)
    assert [one[:2] for one in lab.asked] == 2 * [
        (task, donors) for task in ("one-hop", "logs") for donors in ("alone", "stream")
    ], "tasks grow alike"
    assert {one.key for one in records} == {
        (task, n, donors)
        for task in ("one-hop", "logs")
        for n in (0, 1)
        for donors in ("alone", "stream")
    }


@pytest.mark.parametrize("which", seeds.SETS)
def test_examples_are_those_of_the_set_that_is_named(which: str) -> None:
    lab = FakeLab()
    ask(lab, replace(load(samples=1), seeds=which), Records(SETTING))
    assert lab.drawn == [
        draw(task, 0, seeds.rng(which, task, 0), Words().measure) for task in ("one-hop", "logs")
    ]


def test_examples_of_few_documents_are_passed_over_where_that_is_asked() -> None:
    every = Records(SETTING)
    ask(FakeLab(), load(samples=8), every)
    least = sorted(one.documents for one in every)[len(every) // 2]
    lab, many = FakeLab(), Records(SETTING)
    assert ask(lab, replace(load(samples=8), least_documents=least), many)
    assert [one.key for one in many] == [one.key for one in every if one.documents >= least]
    assert 0 < len(many) < len(every)
    assert len(lab.asked) == len(many)


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    file = tmp_path / "new" / "out.jsonl"
    lab = FakeLab()
    lab.interrupt_after = 3
    assert not ask(lab, load(), Records.open(file, SETTING, "abc"))
    assert len(lab.asked) == 3
    with file.open("a") as torn:
        torn.write('{"task": "one-h')
    again = FakeLab()
    records = Records.open(file, SETTING, "abc")
    assert len(records) == 3
    assert ask(again, load(), records)
    assert len(again.asked) == 8 - 3
    read = Records.open(file, SETTING, "abc")
    assert list(read) == list(records)
    done = FakeLab()
    assert ask(done, load(), read)
    assert done.asked == []


def test_only_new_policies_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    ask(FakeLab(), load(samples=1), Records.open(file, SETTING, "abc"))
    lab = FakeLab()
    ask(lab, load(samples=1, arms=("shift", "epic")), Records.open(file, SETTING, "abc"))
    assert {one[2] for one in lab.asked} == {("epic",)}
    merged = Records.open(file, SETTING, "abc")
    assert {tuple(one.arms) for one in merged} == {("default", "shift", "epic")}


def test_what_was_measured_beside_another_answer_of_full_prefill_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under every kind of donors: an example has one answer in full."""
    file = tmp_path / "out.jsonl"
    ask(FakeLab(), load(samples=1, arms=("default", "peaks")), Records.open(file, SETTING, "abc"))
    lab, records = FakeLab(), Records.open(file, SETTING, "abc")
    records.add(record(shift=outcome()))  # one kind of donors of one example has it
    lab.answer = replace(FULL, said="4821.")
    what = load(samples=1)
    assert ask(lab, what, records)
    assert list(run.to_do(what, records)) == []
    both = ("default", "shift")
    kinds = [(task, donors) for task in what.tasks for donors in what.donors]
    assert lab.asked == [(*kind, both) for kind in kinds]
    for found in (records, Records.open(file, SETTING, "abc")):
        assert {(one.full.said, tuple(one.arms)) for one in found} == {("4821.", both)}
    assert "9 outcomes were dropped: full prefill answers otherwise" in capsys.readouterr().err
    assert ask(FakeLab(), what, Records.open(file, SETTING, "abc"))
    assert "dropped" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (replace(SETTING, model="other"), "with model small, not other"),
        (replace(SETTING, kv_cache_dtype="fp8"), "with kv_cache_dtype auto, not fp8"),
        (replace(SETTING, model_digest="f"), "with model_digest 0123, not f"),
        (replace(SETTING, seeds="tuning"), "with seeds reporting, not tuning"),
        (replace(SETTING, seed="2"), "with seed 1, not 2"),
        (replace(SETTING, text="x"), "with text 4567, not x"),
        (replace(SETTING, least_documents=24), "with least_documents 1, not 24"),
    ],
)
def test_records_of_another_run_are_refused(tmp_path: Path, setting: Setting, told: str) -> None:
    file = tmp_path / "out.jsonl"
    Records.open(file, SETTING, "abc").add(record(default=outcome()))
    with pytest.raises(RecordsError, match=told):
        Records.open(file, setting, "abc")


def test_records_of_another_commit_need_consent(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    Records.open(file, SETTING, "abc").add(record(default=outcome()))
    with pytest.raises(RecordsError, match="at commit abc, this is def: go on with --resume"):
        Records.open(file, SETTING, "def")
    assert len(Records.open(file, SETTING, "def", any_commit=True)) == 1


def at(commit: str, record: Record) -> Record:
    return replace(record, commit=commit)


def test_every_arm_keeps_the_commit_that_it_was_measured_at(tmp_path: Path) -> None:
    """Also where files are joined, or one is gone on with, and an arm is measured anew."""
    file = tmp_path / "out.jsonl"
    Records.open(file, SETTING, "a").add(at("a", record(default=outcome(), shift=outcome(0.5))))
    more = Records.open(file, SETTING, "b", any_commit=True)
    more.add(at("b", record(epic=outcome())))
    assert more.commits == {"a", "b"}
    with pytest.raises(RecordsError, match="at commit a, this is b"):
        Records.open(file, SETTING, "b")
    joined = Records.joined([file])
    joined.write(tmp_path / "joined.jsonl")
    assert Records.joined([tmp_path / "joined.jsonl"]).commits == {"a", "b"}
    more.add(at("c", record(default=outcome(), shift=outcome())))
    assert more.commits == {"b", "c"}
    [merged] = more
    assert merged.arms["shift"].score == 1.0
    assert set(merged.arms) == {"default", "shift", "epic"}


def test_arms_are_only_compared_with_the_answer_beside_which_they_were_measured(
    tmp_path: Path,
) -> None:
    """Full prefill may answer otherwise elsewhere."""
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file, full, name in zip(files, (1.0, 0.0), ("default", "shift"), strict=True):
        Records.open(file, SETTING, "abc").add(record(full=full, **{name: outcome()}))
    with pytest.raises(RecordsError, match=r"second.jsonl: full prefill answered one-hop 0 \(alon"):
        Records.joined(files)
    records = Records.open(files[0], SETTING, "abc")
    records.add(record(full=0.0, shift=outcome()))
    for found in (records, Records.open(files[0], SETTING, "abc")):
        assert found.missing(("one-hop", 0, "alone"), ["default", "shift"]) == ["default"]
        assert [one.full.score for one in found] == [0.0]


@pytest.mark.parametrize(
    "content", ["hello\n", "[1]\n", '{"a": 1}\n', "no line", '{"suite": "english"}\n{}\n']
)
def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(content)
    with pytest.raises(RecordsError, match="choose another"):
        Records.open(file, SETTING, "abc")
    assert file.read_text() == content


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    Records.open(file, SETTING, "abc").add(record(default=outcome()))
    with file.open("a") as out:
        out.write('{"task": "one-hop"}\n')
    with pytest.raises(RecordsError, match="line 3 is no record"):
        Records.open(file, SETTING, "abc")


def of_tasks(file: Path, tasks: Sequence[str], setting: Setting = SETTING) -> Path:
    records = Records.open(file, setting, "abc")
    for task in tasks:
        records.add(record(0, task, default=outcome()))
    return file


def test_records_of_several_processes_are_joined(tmp_path: Path) -> None:
    files = [of_tasks(tmp_path / f"{task}.jsonl", [task]) for task in ("logs", "react")]
    joined = Records.joined(files)
    assert [one.task for one in joined] == ["logs", "react"]
    joined.write(files[0])
    assert list(Records.open(files[0], SETTING, "abc")) == list(joined)
    assert len(list(tmp_path.iterdir())) == 2, "nothing else is left"


def test_records_of_other_settings_are_not_joined(tmp_path: Path) -> None:
    first = of_tasks(tmp_path / "first.jsonl", ["logs"])
    second = of_tasks(tmp_path / "second.jsonl", ["react"], replace(SETTING, seed="2"))
    with pytest.raises(RecordsError, match=r"second\.jsonl was measured with .*'seed': '2'"):
        Records.joined([first, second])
    with pytest.raises(RecordsError, match="no records to join"):
        Records.joined([of_tasks(tmp_path / "empty.jsonl", [])])
    with pytest.raises(RecordsError, match=r"third\.jsonl cannot be read: No such file"):
        Records.joined([tmp_path / "third.jsonl"])
    second.write_text('{"english": {"model": "small"}}\n')
    with pytest.raises(RecordsError, match="line 1 is no record of this version"):
        Records.joined([second])


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    first = model_digest(tmp_path)
    assert first == model_digest(tmp_path)
    weights.write_bytes(bytes(2_999_999) + b"x")
    assert model_digest(tmp_path) != first


def rows_of(records: Sequence[Record], **wanted: Any) -> list[dict[str, Any]]:
    rows, _ = figures.figures(records)
    return [row for row in rows if wanted.items() <= row.items()]


def test_a_row_compares_a_policy_with_full_prefill() -> None:
    records = [
        record(n, default=outcome(n % 2, first_kl=0.1 * n, answer_kl=0.2, agreement=0.5))
        for n in range(10)
    ]
    (row,) = rows_of(records, policy="default")
    assert (row["samples"], row["accuracy"], row["difference"]) == (10, 0.5, -0.5)
    assert row["differing"] == 5
    assert row["p_against_full"] == row["p_holm"] == pytest.approx(2 / 2**5, abs=1e-3)
    assert row["low"] == pytest.approx(0.187, abs=1e-3), "Clopper and Pearson's"
    assert row["first_kl"] == pytest.approx(0.45)
    assert row["kl_p90"] == pytest.approx(0.81)
    assert (row["answer_kl"], row["answer_kl_low"]) == (0.2, None)
    assert (row["agreement"], row["work"]) == (0.5, 0.2)
    assert (row["ttft_ms"], row["full_ttft_ms"]) == (200, 1000)
    (full,) = rows_of(records, policy="full")
    assert (full["accuracy"], full["work"]) == (1, 1)


def test_all_cells_are_one_family() -> None:
    lost = [outcome(0.0)] * 8
    some = [record(n, donors="alone", shift=one) for n, one in enumerate(lost)]
    more = [record(n, donors="stream", shift=outcome()) for n in range(8)]
    (alone,) = rows_of([*some, *more], policy="shift", donors="alone")
    assert alone["p_holm"] == pytest.approx(2 * alone["p_against_full"], rel=0.05)
    assert alone["verdict"] == "lower"


def test_tasks_that_the_model_cannot_do_are_reported_by_divergence_only() -> None:
    able = [record(n, shift=outcome(0.0), default=outcome()) for n in range(8)]
    unable = [
        record(n, "react", full=float(n < 2), shift=outcome(0.0), default=outcome(0.0))
        for n in range(8)
    ]
    (row,) = rows_of([*able, *unable], task="react", policy="default")
    assert not row["able"]
    assert "p_holm" not in row
    _, summary = figures.figures([*able, *unable])
    assert summary["alone_over_full"] == 1, "of the other task"
    assert summary["tasks_by_kl_only"] == "react"
    assert summary["tasks"] == 2


def test_half_of_the_answers_is_able() -> None:
    half = [record(n, full=n % 2, default=outcome()) for n in range(4)]
    assert rows_of(half, policy="default")[0]["able"]


def of_even_and_odd(even: float, odd: float, default: Outcome) -> list[Record]:
    return [record(n, full=(even, odd)[n % 2], default=default) for n in range(6)]


def test_answers_count_by_the_other_half_of_the_examples() -> None:
    _, summary = figures.figures(of_even_and_odd(0.5, 0.25, default=outcome(0.125)))
    assert summary["alone_over_full"] == 0.5, "the odd ones, for the even ones are answered"
    assert summary["alone_counted"] == 3
    assert summary["tasks_by_kl_only"] == "one-hop"


def test_without_a_right_answer_of_full_prefill_there_is_no_share() -> None:
    _, summary = figures.figures(of_even_and_odd(1.0, 0.0, default=outcome(work=0.3)))
    assert (summary["alone_over_full"], summary["alone_work"]) == (None, 0.3)


def test_the_only_example_of_a_task_counts() -> None:
    _, summary = figures.figures([record(3, full=0.25, default=outcome(0.125))])
    assert summary["alone_over_full"] == 0.5


def test_a_policy_of_equal_luck_loses_nothing() -> None:
    """Answers of both are right half of the time, whatever the other's are."""
    rng = Random(0)
    tasks = [f"task {index}" for index in range(2000)]
    records = [
        record(n, task, full=rng.randrange(2), default=outcome(rng.randrange(2)))
        for task in tasks
        for n in range(3)
    ]
    cells = pooling.by_cell(records)
    found = pooling.against_full(cells, pooling.counted_numbers(cells), "default")
    assert found["over_full"] == pytest.approx(1, abs=0.05)


def test_the_summary_pools_examples_of_equal_weight() -> None:
    records = [
        *(record(n, "one-hop", "siblings", default=outcome(1.0, work=0.1)) for n in range(2)),
        *(record(n, "logs", "siblings", default=outcome(0.5, work=0.3)) for n in range(6)),
        *(record(n, "logs", "alone", default=outcome(0.0, work=0.4)) for n in range(6)),
        *(record(n, "logs", "knowledge", default=outcome(1.0, work=0.25)) for n in range(6)),
    ]
    _, summary = figures.figures(records)
    assert summary["default_over_full"] == 0.625, "of two right answers and six half of them"
    assert summary["default_work"] == 0.25
    assert (summary["alone_over_full"], summary["alone_work"]) == (0.0, 0.4)
    assert (summary["kb_over_full"], summary["kb_work"]) == (1.0, 0.25)
    assert summary["stream_over_full"] is None
    assert summary["samples_per_cell"] == 2
    assert summary["harm_cells"] is None, "shift was not asked"
    assert summary["drift_rank_correlation"] is None


def test_an_example_under_several_kinds_of_donors_is_one_value() -> None:
    """Its answers go together: asked twice, it says no more of what other examples would show."""
    scores = [0.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 0.0]
    once, twice = (
        [record(n, "logs", kind, default=outcome(score)) for n, score in enumerate(scores)]
        for kind in ("siblings", "reversed")
    )
    _, of_one = figures.figures(once)
    _, of_both = figures.figures([*once, *twice])
    for name in ("over_full", "less_full_low", "less_full_high", "examples"):
        assert of_both[f"default_{name}"] == of_one[f"default_{name}"], name
    assert (of_one["default_counted"], of_both["default_counted"]) == (8, 16)
    other = [replace(one, arms={"default": outcome(1.0)}) for one in twice]
    _, mixed = figures.figures([*once, *other])
    low, high = mixed["default_less_full_low"], mixed["default_less_full_high"]
    expected = statistics.difference_interval([(1 + score) / 2 for score in scores], [1.0] * 8)
    assert (low, high) == pytest.approx(expected, abs=1e-4)


def test_share_and_interval_are_of_the_same_mean() -> None:
    """Whatever the sizes of tasks are: one of four examples weighs less than one of 160."""
    records = [
        *(record(n, "one-hop", default=outcome(0.0)) for n in range(4)),
        *(record(n, "logs", default=outcome(1.0)) for n in range(160)),
    ]
    _, summary = figures.figures(records)
    assert summary["alone_over_full"] == pytest.approx(160 / 164, abs=1e-4)
    lost = summary["alone_over_full"] - 1
    assert summary["alone_less_full_low"] <= lost <= summary["alone_less_full_high"]


def test_every_policy_has_a_row_of_all_tasks_together() -> None:
    records = [
        *(record(n, "one-hop", "alone", default=outcome(1.0, work=0.1)) for n in range(2)),
        *(record(n, "logs", "alone", default=outcome(0.5, work=0.3)) for n in range(6)),
        *(record(n, "logs", "stream", epic=outcome(0.25, work=0.2)) for n in range(6)),
        *(record(n, "react", "stream", full=0.0, epic=outcome(work=0.4)) for n in range(6)),
    ]
    rows, _ = figures.figures(records)
    first, second = (row for row in rows if "pooled" in row)
    assert (first["pooled"], first["donors"], first["samples"]) == ("default", "alone", 8)
    assert (first["over_full"], first["work"]) == (0.625, 0.25), "of equal examples"
    assert (second["pooled"], second["donors"], second["samples"]) == ("epic", "stream", 12)
    assert second["over_full"] == 0.25, "of what full prefill can do"
    assert second["work"] == 0.3
    assert second["less_full_low"] <= -0.75 <= second["less_full_high"]
    assert figures.in_cells({"rows": [first], "summary": {}}) == []


def test_harm_is_where_the_default_is_significantly_worse_than_shift() -> None:
    def cell(donors: str, number: int, worse: int) -> list[Record]:
        return [
            record(
                n,
                donors=donors,
                default=outcome(float(n >= worse), answer_kl=0.5 if n < worse else 0.1),
                shift=outcome(1.0, answer_kl=0.1),
            )
            for n in range(number)
        ]

    _, summary = figures.figures([*cell("alone", 12, 8), *cell("reversed", 12, 3)])
    assert (summary["harm_cells"], summary["harm"]) == (1, "one-hop alone")
    assert (summary["harm_cells_kl"], summary["harm_kl"]) == (1, "one-hop alone")
    better = [record(n, default=outcome(), shift=outcome(0.0)) for n in range(12)]
    assert figures.figures(better)[1]["harm_cells"] == 0


def test_percentile_and_drift_are_of_the_default() -> None:
    records = [
        record(n, default=outcome(first_kl=n / 10, drift=n**2), shift=outcome(first_kl=9.0))
        for n in range(11)
    ]
    _, summary = figures.figures(records)
    assert (summary["kl_p90"], summary["kl_p90_of"]) == (pytest.approx(0.9), "default")
    assert summary["drift_rank_correlation"] == 1
    assert summary["in_full"] == 0
    full = [record(0, default=outcome(work=1.0)), record(1, default=outcome(work=0.5))]
    assert figures.figures(full)[1]["in_full"] == 0.5


def test_percentile_and_share_in_full_are_of_the_bounded_policy_where_it_was_asked() -> None:
    records = [
        record(
            n,
            default=outcome(first_kl=n / 10, drift=n, work=0.2),
            close=outcome(first_kl=n / 20 if n < 8 else 0.0, drift=n, work=0.2 + (n >= 8)),
        )
        for n in range(11)
    ]
    _, summary = figures.figures(records)
    assert (summary["kl_p90"], summary["kl_p90_of"]) == (pytest.approx(0.3), "close")
    assert summary["kl_p90_work"] == pytest.approx(0.2 + 3 / 11, abs=1e-4)
    assert summary["in_full"] == pytest.approx(3 / 11, abs=1e-4)
    assert summary["drift_rank_correlation"] == 1, "of the default's requests"
    assert summary["alone_work"] == 0.2


def test_lengths_have_rows_without_tests() -> None:
    records = [
        record(n, "needles", kind=("1k", "2k")[n % 2], default=outcome(float(n % 2)))
        for n in range(6)
    ]
    (short,) = rows_of(records, policy="default", kind="1k")
    assert (short["samples"], short["accuracy"]) == (3, 0)
    assert "p_holm" not in short


def test_rows_come_in_the_order_in_which_they_were_asked() -> None:
    records = [
        record(0, "one-hop", donors, shift=outcome(), default=outcome())
        for donors in ("stream", "alone")
    ]
    rows, summary = figures.figures(records)
    found = figures.in_cells({"rows": rows, "summary": summary})
    order = [(row["donors"], row["policy"]) for row in found]
    assert order == [(d, p) for d in ("stream", "alone") for p in ("full", "shift", "default")]


def test_nothing_measured_is_no_result() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        figures.figures([])


def test_divergence_is_over_the_whole_vocabulary() -> None:
    full = torch.tensor([0.5, 0.25, 0.25]).log()
    other = torch.tensor([0.25, 0.625, 0.125]).log()
    (found,) = divergences([full + 3], [other - 1])
    assert found == pytest.approx(0.5 * log(2) + 0.25 * log(0.4) + 0.25 * log(2))
    assert divergences([full], [full]) == [0.0]
    assert favourites([full, other]) == [0, 1]
    with pytest.raises(ValueError, match="zip"):
        divergences([full], [])


def test_a_tape_forces_tokens_and_keeps_what_would_have_been_said() -> None:
    tape = Tape([2, 1])
    for said in (2, 1, 0):  # the last one freely
        logits = torch.tensor([5.0, 1.0, 0.0])
        tape.record(logits)
        assert int(logits.argmax()) == said
    assert favourites(tape.logits) == [0, 0, 0]


def test_requests_that_decode_together_have_tapes_of_their_own() -> None:
    tapes = [Tape([1]), Tape([2])]
    assert [tape_of(tape.extra_args) for tape in tapes] == tapes
    assert tape_of(None) is None
    assert tape_of({"extra_keys": ["docs"]}) is None
    named = tapes.pop().extra_args
    assert tape_of(named) is None, "nobody reads it any more"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> FakeLab:
    lab = FakeLab()
    use_lab(monkeypatch, lab)
    monkeypatch.setattr(harness, "commit", lambda: "abc")
    return lab


Start = Callable[..., int]


@pytest.fixture
def start(model: Path, lab: FakeLab) -> Start:
    def start(*arguments: str) -> int:
        return bench.main(["english", "--model", str(model), "--quick", *arguments])

    return start


def test_a_run_leaves_json_lines_and_a_page(start: Start, tmp_path: Path, lab: FakeLab) -> None:
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    assert start("--json", str(out), "--html", str(html), "--tasks", "needles,logs") == 0
    result = json.loads(out.read_text())
    assert result["suite"] == "english"
    assert result["environment"]["commits"] == ["abc"]
    summary = result["summary"]
    keys = "default_over_full default_work alone_over_full alone_work kb_over_full kb_work "
    keys += "harm_cells kl_p90 drift_rank_correlation tasks samples_per_cell"
    assert set(keys.split()) <= set(summary)
    assert (summary["tasks"], summary["samples_per_cell"]) == (2, 3)
    assert (summary["model"], summary["seeds"]) == ("small", "reporting")
    assert summary["seed"] == seeds.SETS["reporting"]
    assert {row["donors"] for row in result["rows"] if "pooled" in row} == set(DONORS)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1 + 2 * 3 * 5
    written = html.read_text()
    assert "<h2>Donors: siblings</h2>" in written
    assert "http" not in written.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("https://matplotlib.org", "").replace("http://creativecommons.org", "")
    lab.asked.clear()
    assert start("--json", str(out), "--tasks", "needles,logs") == 0
    assert lab.asked == [], "everything is there"


def again(*arguments: str) -> int:
    return bench.main(["english", *arguments])


def test_figures_are_made_anew_from_records(
    start: Start,
    tmp_path: Path,
    lab: FakeLab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    halves = [tmp_path / "first.json", tmp_path / "second.json"]
    for half, task in zip(halves, ("needles", "logs"), strict=True):
        assert start("--json", str(half), "--tasks", task) == 0
    whole, html = tmp_path / "whole.json", tmp_path / "whole.html"
    files = ",".join(str(half.with_suffix(".jsonl")) for half in halves)
    lab.asked.clear()
    assert again("--records", files, "--json", str(whole), "--html", str(html)) == 0
    result = json.loads(whole.read_text())
    assert (result["summary"]["tasks"], result["environment"]["commits"]) == (2, ["abc"])
    assert "interrupted" not in result["environment"], "that was one of the processes"
    assert "<h2>Donors: siblings</h2>" in html.read_text()
    assert len(whole.with_suffix(".jsonl").read_text().splitlines()) == 1 + 2 * 3 * 5
    assert lab.asked == []
    assert result["environment"]["chat_template"] is True, "as where the first half was measured"
    elsewhere = {**harness.environment(), "cpu": "another"}
    monkeypatch.setattr(harness, "environment", lambda: elsewhere)
    assert again("--records", files, "--json", str(whole)) == 0
    assert json.loads(whole.read_text()) == result, "it was measured where it was"
    halves[0].unlink()
    whole.unlink()
    assert again("--records", files, "--json", str(whole)) == 2
    assert f"{halves[0]} does not exist, so nothing says where" in capsys.readouterr().err


def test_without_records_a_model_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert again("--quick") == 2
    assert "--model DIR is needed" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("[]")
    records = str(of_tasks(tmp_path / "some.jsonl", ["logs"]))
    assert again("--records", records, "--json", str(tmp_path / "other.json")) == 2
    assert "is no result of `bench`" in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_measured(start: Start, tmp_path: Path, lab: FakeLab) -> None:
    lab.interrupt_after = 4
    out = tmp_path / "out.json"
    assert start("--json", str(out)) == 130
    result = json.loads(out.read_text())
    assert result["environment"]["interrupted"]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1 + 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tasks", "luck"], "no task 'luck'; there are needles"),
        (["--donors", "luck"], "no donors 'luck'; there are alone"),
        (["--policies", "luck"], "no policy 'luck'"),
        (["--policies", "focus:recompute_ratio=7"], "recompute_ratio=7"),
        (["--samples", "0"], "--samples 0"),
        (["--samples", "many"], "invalid int value"),
        (["--luck"], "unrecognized arguments"),
        (["--model", "/nowhere"], "no model in /nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    start: Start, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("bench english: ")
    assert told in printed.err
    assert printed.err.count("\n") == 1


def test_records_of_another_model_or_of_other_seeds_end_with_2(
    start: Start,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ["--json", str(tmp_path / "out.json"), "--tasks", "logs", "--samples", "1"]
    assert start(*out) == 0
    monkeypatch.setenv("BENCH_QUALITY_SEEDS", "tuning")
    assert start(*out) == 2
    assert "with seeds reporting, not tuning" in capsys.readouterr().err
    monkeypatch.delenv("BENCH_QUALITY_SEEDS")
    (model / "model.safetensors").write_bytes(b"others")
    assert start(*out) == 2
    assert "model_digest" in capsys.readouterr().err


def test_a_page_marks_what_is_lower(tmp_path: Path) -> None:
    records = [record(n, default=outcome(0.0), shift=outcome()) for n in range(12)]
    rows, summary = figures.figures(records)
    where = harness.environment()
    page.write(tmp_path / "a.html", where, {"rows": rows, "summary": summary})
    written = (tmp_path / "a.html").read_text()
    assert written.count("<div class=lower>") == 1
    assert "one-hop alone" in written
    page.write(tmp_path / "b.html", where, {"rows": rows, "summary": summary})
    assert (tmp_path / "b.html").read_text() == written
