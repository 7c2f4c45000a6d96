# SPDX-License-Identifier: Apache-2.0
"""The quality lab: examples have the answers that their text has, and figures are what they say."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest

from bench.harness import REPOSITORY, BenchError
from bench.quality import language, seeds
from bench.quality.tasks import TASKS, Example, example
from bench.suites import quality
from lab import mixture

DRAWS = [(task, seed) for task in TASKS for seed in range(5)]


def solve(example: Example) -> list[str]:
    """The answer, found by reading the text as a person would."""
    words = [word for document in example.documents for word in document]
    question = example.suffix[len(example.suffix) - example.suffix[::-1].index("?") - 1 :]
    asked = question[question.index(":") + 1 :]
    triples = list(zip(words, words[1:], words[2:], strict=False))
    match example.task:
        case "mq-niah":
            facts = {words[i + 1]: words[i + 3 : i + 5] for i, w in enumerate(words) if w == "of"}
            return _told(question, facts)
        case "vt" | "mq-vt":
            values: dict[str, list[str]] = {}
            for i, word in enumerate(words):
                if word == "let":
                    values[words[i + 1]] = values.get(words[i + 3], [words[i + 3]])
            return _told(question, values)
        case "cwe":
            items = Counter(words[i + 1] for i, w in enumerate(words) if w == "item")
            often = max(items.values())
            return [*sorted(code for code, count in items.items() if count == often), "."]
        case "fwe":
            codes = Counter(w for w in words if w in language.CODES)
            return [*(code for code, _ in codes.most_common(3)), "."]
        case "two-hop qa":
            lead, place = ({}, {})
            for a, b, c, d in zip(words, words[1:], words[2:], words[3:], strict=False):
                if c == "is":
                    {"lead": lead, "place": place}.get(a, {})[b] = d
            return [place[lead[asked[0]]], "."]
        case "chat memory":
            last = {a: c for a, b, c in triples if b in ("is", "now")}
            return [last[asked[0]], "."]
        case "debate":
            said = [c for a, b, c in triples if (a, b) == (asked[0], "is")]
            return [Counter(said).most_common(1)[0][0], "."]
    raise AssertionError(example.task)


def _told(question: Sequence[str], values: Mapping[str, Sequence[str]]) -> list[str]:
    """The answer to `? RELATION a , b : a`: the value of each name."""
    names = [w for w in question[2 : question.index(":")] if w != ","]
    told = [word for name in names for word in (",", name, *values[name])]
    return [*told[2:], "."]


@pytest.mark.parametrize(("task", "seed"), DRAWS)
def test_the_answer_follows_from_the_documents(task: str, seed: int) -> None:
    drawn = example(task, Random(seed))
    assert solve(drawn) == list(drawn.answer)
    assert drawn.score(list(drawn.answer)) == 1
    assert drawn.score(["."]) == 0
    assert 1900 < len(drawn.prompt) < 2100


@pytest.mark.parametrize("task", TASKS)
def test_documents_were_computed_in_another_order_behind_another_text(task: str) -> None:
    drawn = example(task, Random(3))
    before = {}
    for context in drawn.contexts:
        text = " ".join(context)
        found = [i for i, d in enumerate(drawn.documents) if " ".join(d) in text]
        starts = [text.index(" ".join(drawn.documents[i])) for i in found]
        order = [i for _, i in sorted(zip(starts, found, strict=True))]
        assert order == sorted(order, reverse=True)
        before |= dict.fromkeys(order)
    assert set(before) == set(range(len(drawn.documents)))


def test_hops_cross_documents() -> None:
    drawn = example("vt", Random(0))
    for first, second in pairwise(drawn.documents):
        assert {w for w in first if w in language.VARIABLES} & {
            w for w in second if w in language.VARIABLES
        }


def test_the_layout_of_a_prompt_varies() -> None:
    plain = example("vt", Random(0))
    mixed = example("vt", Random(0), question_first=True, interleaved=1.0)
    question = mixed.suffix[mixed.suffix.index("?") :]
    assert mixed.prefix[-len(question) :] == question
    assert "?" not in plain.prefix
    assert all(mixed.new_between)
    assert language.decode(language.encode(mixed.prompt)) == mixed.prompt


def test_half_an_answer_is_half_right() -> None:
    drawn = example("fwe", Random(0))
    first, _, third, _ = drawn.answer
    assert drawn.score([third, first, "."]) == pytest.approx(2 / 3)
    needles = example("mq-niah", Random(0))
    assert needles.score(list(needles.answer[:2])) == pytest.approx(2 / 8)


def test_to_repeat_the_names_that_were_asked_for_is_worth_nothing() -> None:
    drawn = example("mq-vt", Random(0))
    names_only = [w if w in (*drawn.suffix, ",", ".") else "n00" for w in drawn.answer]
    assert len(set(names_only) & set(language.VARIABLES)) == 3
    assert drawn.score(names_only) == sum(w == "n00" for w in drawn.answer) / 4


def test_the_tokenizer_agrees_with_the_language() -> None:
    words = example("cwe", Random(0)).prompt
    ids = language.tokenizer()(" ".join(words), add_special_tokens=False)["input_ids"]
    assert ids == language.encode(words)
    assert len(language.tokenizer()) == language.VOCABULARY_SIZE


def test_training_rows_teach_only_what_can_be_known() -> None:
    stage = mixture.Stage(256, 8, max_hops=3, recall=0.2)
    drawn = mixture.batch(Random(1), stage)
    flat = drawn.tokens.flatten()
    learnt = language.decode(flat[drawn.where + 1])
    assert not set(learnt) & {*language.NOISE, *language.INSTRUCTION, "<pad>", "<bos>", "?"}
    again = mixture.batch(Random(1), stage)
    assert (again.tokens == drawn.tokens).all()


def test_arms_are_what_a_request_may_ask_for() -> None:
    from vllm_segreuse.config import SegReuseConfig
    from vllm_segreuse.options.parsing import parse_request

    names = [arm.name for arm in quality.ARMS]
    assert len(set(names)) == len(names)
    assert set(quality.PUBLISHED) <= set(names)
    for arm in quality.ARMS:
        parse_request(arm.extra_args, SegReuseConfig())


def test_no_example_is_both_tuned_and_reported_on() -> None:
    numbers = range(quality.FULL_LOAD.samples)
    # All choices of an example come from its source: other bits, another example.
    sources = [
        quality.draw(name, task, number)["rng"].getrandbits(128)
        for name in seeds.SETS
        for task in TASKS
        for number in numbers
    ]
    assert len(set(sources)) == len(sources) == len(seeds.SETS) * len(TASKS) * len(numbers)
    prompts = [
        example(**quality.draw(name, task, 0)).prompt for name in seeds.SETS for task in TASKS
    ]
    assert all(one != other for one, other in combinations(prompts, 2))


def test_a_run_reports_on_the_reporting_seeds_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[quality.Load] = []

    def ask_all(_: object, load: quality.Load) -> Mapping[str, object]:
        asked.append(load)
        return {}

    monkeypatch.setattr(quality, "alone", nullcontext)
    monkeypatch.setattr(quality, "ask_all", ask_all)
    monkeypatch.setattr(quality, "figures", lambda *_: ([], {}))
    monkeypatch.delenv("BENCH_QUALITY_SEEDS", raising=False)
    assert quality.run(quick=True)["summary"]["seeds"] == "reporting"
    monkeypatch.setenv("BENCH_QUALITY_SEEDS", "tuning")
    assert quality.run(quick=True)["summary"]["seeds"] == "tuning"
    assert [load.seeds for load in asked] == ["reporting", "tuning"]
    monkeypatch.setenv("BENCH_QUALITY_SEEDS", "lucky")
    with pytest.raises(BenchError, match="lucky: there are only tuning and reporting"):
        quality.run(quick=True)


def test_the_seeds_that_thresholds_were_chosen_on_stay_the_tuning_ones() -> None:
    """`LEAST_SHARE` was chosen on examples drawn from 20260601: they are never reported on."""
    drawn = example(**quality.draw("tuning", "vt", 0))
    assert drawn == example("vt", Random("20260601 vt 0"))
    assert drawn != example(**quality.draw("reporting", "vt", 0))


def test_examples_are_asked_of_the_set_that_the_load_names() -> None:
    class Engines:
        def ask(self, draws: Any, arms: Any) -> Any:
            return ((example(**one), {}) for one in draws)

    for name in seeds.SETS:
        load = quality.Load(("vt",), 2, (), name)
        found = quality.ask_all(Engines(), load)["vt"]  # type: ignore[arg-type]
        assert [drawn for drawn, _ in found] == [
            example(**quality.draw(name, "vt", number)) for number in range(2)
        ]


@pytest.mark.parametrize("asked", [1, 2])
def test_an_interrupted_run_is_not_told_to_be_whole(
    asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engines:
        def ask(self, draws: Any, arms: Any) -> Any:
            yield from ((example(**one), {}) for one in list(draws)[:asked])
            raise KeyboardInterrupt

    monkeypatch.setattr(quality, "alone", lambda: nullcontext(Engines()))
    monkeypatch.setattr(quality, "QUICK_LOAD", quality.Load(("vt",), 2, ()))
    monkeypatch.setattr(quality, "figures", lambda *_: ([], {}))
    assert quality.run(quick=True)["interrupted"] is (asked < 2)


@pytest.mark.parametrize(("model", "asked"), [("lab", False), ("seed0", True)])
def test_a_model_is_asked_the_tasks_that_it_has_learnt(
    monkeypatch: pytest.MonkeyPatch, model: str, asked: bool
) -> None:
    loads: list[quality.Load] = []
    monkeypatch.setattr(quality, "MODEL", REPOSITORY / "models" / model)
    monkeypatch.setattr(quality, "Workers", nullcontext)
    monkeypatch.setattr(quality, "ask_all", lambda _, load: loads.append(load) or {})
    monkeypatch.setattr(quality, "figures", lambda *_: ([], {}))
    monkeypatch.delenv("BENCH_QUALITY_TASKS", raising=False)
    summary = quality.run(quick=False)["summary"]
    assert summary["model"] == f"models/{model}"
    assert ("mq-vt" in loads[0].tasks) is asked
    assert {*TASKS} - {"mq-vt"} <= {*loads[0].tasks}
    monkeypatch.setenv("BENCH_QUALITY_TASKS", "mq-vt,cwe")
    quality.run(quick=False)
    assert loads[1].tasks == ("mq-vt", "cwe")
    monkeypatch.setenv("BENCH_QUALITY_TASKS", "vt,luck")
    with pytest.raises(BenchError, match="no task \\['luck'\\]"):
        quality.run(quick=False)
