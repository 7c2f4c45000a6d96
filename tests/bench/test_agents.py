# SPDX-License-Identifier: Apache-2.0
"""`bench agents` without an engine: what is asked, what is right, and what figures say of it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import harness
from bench.agents import (
    arms,
    by_trace,
    command,
    distance,
    figures,
    scoring,
    success,
    traces,
    verdicts,
)
from bench.agents.completions import Answered
from bench.agents.distance import Apart
from bench.agents.episodes import CALCULATOR, FINAL, SEARCH, Step
from bench.agents.records import Compared
from bench.agents.serving import Free, Taken
from bench.agents.success import Paired
from bench.agents.tokens import Tokens
from bench.quality import seeds
from bench.records import RecordsError
from examples.agents import react, tools

# What is asked.


@pytest.mark.parametrize("kind", traces.KINDS)
def test_a_trace_is_the_same_at_every_call_and_another_of_other_seeds(kind: str) -> None:
    assert traces.draw(kind, 3, "tuning") == traces.draw(kind, 3, "tuning")
    assert traces.draw(kind, 3, "tuning") != traces.draw(kind, 4, "tuning")
    assert traces.draw(kind, 3, "tuning") != traces.draw(kind, 3, "reporting")


@pytest.mark.parametrize("kind", traces.KINDS)
@pytest.mark.parametrize("number", range(3))
def test_labels_lead_to_the_answer(kind: str, number: int) -> None:
    trace = traces.draw(kind, number, "tuning")
    for conversation in trace.conversations:
        episode = conversation.episode
        assert 6 <= len(episode.steps) <= 10
        asked = re.findall(r"(\d) of the (\w+ \w+)", episode.question)
        cost = sum(int(count) * trace.shop.prices[title] for count, title in asked)
        assert episode.answer == str(cost)
        *calls, last = episode.steps
        assert (last.tool, last.given, last.observation) == (FINAL, episode.answer, "")
        for step in calls:
            observation = json.loads(step.observation)
            if step.tool == CALCULATOR:
                assert observation["result"] == tools.calculate(step.given)
            else:
                assert step.tool == SEARCH
                found = observation["results"][0]
                assert found["title"] == step.given
                told = " ".join(line["text"] for line in found["highlights"])
                assert f"costs {trace.shop.prices[step.given]} euros" in told
            assert scoring.step(step.label, step) == 1.0
            assert react.action(step.text) == (step.tool, step.given)
            assert not re.findall(r"\d{2,}", step.thought), "a thought tells no value"


@pytest.mark.parametrize("kind", traces.KINDS)
def test_every_step_is_asked_once_and_in_its_order(kind: str) -> None:
    trace = traces.draw(kind, 0, "tuning")
    assert len(set(trace.requests)) == len(trace.requests)
    for number, conversation in enumerate(trace.conversations):
        mine = [it.step for it in trace.requests if it.conversation == number]
        assert mine == [*range(len(conversation.episode.steps))]
    order = [it.conversation for it in trace.requests]
    assert (order == sorted(order)) == (kind in ("single", "quotes")), "users take turns"
    assert len(trace.conversations) == (1 if kind == "single" else 3)


class Letters:
    """A tokenizer without a chat template: a letter is a token."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return type("Ids", (), {"input_ids": [ord(letter) for letter in text]})

    def decode(self, tokens: tuple[int, ...], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, tokens))


def prompt(trace: traces.Trace, request: traces.Request) -> str:
    return "".join(map(chr, traces.Writer(Letters()).request(trace, request)))


@pytest.mark.parametrize("kind", traces.KINDS)
def test_a_history_only_grows_and_ends_where_the_model_goes_on(kind: str) -> None:
    trace = traces.draw(kind, 1, "tuning")
    for number, conversation in enumerate(trace.conversations):
        prompts = [
            prompt(trace, traces.Request(number, step))
            for step in range(len(conversation.episode.steps))
        ]
        for i, step in enumerate(conversation.episode.steps[:-1]):
            assert prompts[i + 1].startswith(prompts[i] + step.label)
            assert prompts[i].endswith("\nAction:")
        assert prompts[-1].endswith("\nFinal Answer:")


def test_what_conversations_of_a_trace_share_is_where_the_kind_says() -> None:
    def common(kind: str) -> int:
        trace = traces.draw(kind, 0, "tuning")
        first, second = (prompt(trace, traces.Request(i, 0)) for i in range(2))
        return next(
            i for i, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1
        )

    instructions = len(react.instructions())
    assert common("users") >= instructions
    assert common("clock") < 30
    assert common("quotes") < 30


def test_users_ask_about_the_same_articles_and_see_other_values() -> None:
    trace = traces.draw("users", 0, "tuning")
    seen: dict[str, set[str]] = {}
    for conversation in trace.conversations:
        for step in conversation.episode.steps:
            if step.tool == SEARCH:
                seen.setdefault(step.given, set()).add(step.observation)
    observations = [it for found in seen.values() for it in found]
    assert len(observations) == 6, "no two observations are equal"
    assert len(seen) <= 4
    assert max(map(len, seen.values())) > 1


def test_agents_quote_what_others_found() -> None:
    trace = traces.draw("quotes", 0, "tuning")
    users = [conversation.user for conversation in trace.conversations]
    assert [user.count("Note ") for user in users] == [0, 2, 4]
    for step in trace.conversations[0].episode.steps:
        if step.tool == SEARCH:
            quoted = json.dumps(json.loads(step.observation)["results"][0])
            assert all(quoted in user for user in users[1:])


# What is right.


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (" search\nAction Input: the Red chair\nThought", 1.0),
        (" search\nAction Input: chair", 0.0),
        (" calculator\nAction Input: red chair", 0.0),
        (" search for the red chair", 0.0),
        ("", 0.0),
    ],
)
def test_a_search_needs_its_words(said: str, right: float) -> None:
    assert scoring.step(said, Step(SEARCH, "red chair", "")) == right


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (" calculator\nAction Input: 2*15", 1.0),
        (" calculator\nAction Input: 15 * 3", 0.0),
        (" calculator\nAction Input: price * 2", 0.0),
    ],
)
def test_a_calculation_needs_its_value(said: str, right: float) -> None:
    assert scoring.step(said, Step(CALCULATOR, "15 * 2", "")) == right


def test_an_answer_is_its_first_line() -> None:
    label = Step(FINAL, "1030", "")
    assert scoring.step(" 1,030 euros\n", label) == 1.0
    assert scoring.step(" 103\n1030", label) == 0.0


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("abc", "abc", 0), ("", "ab", 1), ("kitten", "sitting", 3 / 7), ("ab", "ba", 1)],
)
def test_levenshtein(first: str, second: str, distance: float) -> None:
    assert scoring.levenshtein(first, second) == scoring.levenshtein(second, first) == distance
    assert scoring.spread([first, second, first]) == pytest.approx(2 * distance / 3)


def test_one_text_has_no_spread() -> None:
    with pytest.raises(ValueError, match="one text"):
        scoring.spread(["a"])


# Arms.


def test_an_arm_says_what_its_requests_have() -> None:
    none, prefix, content, similar = arms.find(["none", "prefix", "content", "similar"])
    assert none.body("s", 1) == {"cache_salt": "s 1"} != none.body("s", 2)
    assert prefix.body("s", 1) == {"cache_salt": "s"} == prefix.body("s", 2)
    assert content.body("s", 1) == {"extra_keys": ["s"], "vllm_xargs": {"segreuse_similarity": 0}}
    assert similar.extra_args("s") == {"extra_keys": ["s"], "segreuse_similarity": 1}
    assert none.extra_args("s") == {}
    with pytest.raises(ValueError, match="no arm 'both'; there are none, prefix"):
        arms.find(["both"])


@pytest.mark.parametrize(
    "arm", [*arms.ARMS.values(), *arms.ABLATIONS.values()], ids=lambda it: it.name
)
def test_every_arm_is_a_configuration(arm: arms.Arm) -> None:
    from vllm_segreuse.config import SegReuseConfig
    from vllm_segreuse.options.parsing import parse_request

    config = SegReuseConfig.from_options(arm.server_options)
    options = parse_request(arm.extra_args("s"), config).options
    assert options.similarity == (arm.options is None or arm.options["similarity"])


def test_arms_share_servers_where_they_can() -> None:
    chosen = arms.find(["none", "similar-run-16", "similar", "similar-tau-80"])
    groups = arms.by_server(chosen)
    assert [[arm.name for arm in found] for _, found in groups] == [
        ["none", "similar"], ["similar-run-16"], ["similar-tau-80"],
    ]  # fmt: skip
    assert groups[1][0] == {**arms.SERVER, "similarity": {"min_run_tokens": 16}}


# Figures.


def taken(arm: str, trace: int, step: int, seconds: float, score: float, **tokens: Any) -> Taken:
    found = Tokens(**{"prompt": 100, "computed": 100} | tokens)
    return Taken("single", trace, 0, step, arm, Answered("x", seconds / 2, seconds, found), score)


def test_tokens_of_a_report() -> None:
    report = {
        "reused_tokens": 60,
        "similar_tokens": 20,
        "prefix_tokens": 20,
        "computed_share": 0.5,
    }
    assert Tokens.of(100, 7, report) == Tokens(100, 20, 40, 20, 40.0)
    assert Tokens.of(100, 32, None) == Tokens(100, 32, 0, 0, 68)
    shares = (Tokens.of(100, 0, report) + Tokens.of(100, 32, None)).shares()
    expected = {"prefix": 0.26, "equal": 0.2, "similar": 0.1, "new": 0.44, "work": 0.54}
    assert shares == pytest.approx(expected)


def test_savings_are_of_whole_traces() -> None:
    found = [
        *(taken("none", trace, step, 2.0, 1.0) for trace in range(6) for step in range(2)),
        *(taken("similar", trace, 0, 0.5, 1.0, computed=60) for trace in range(6)),
        *(taken("similar", trace, 1, 1.5 + trace / 10, 0.0, similar=50) for trace in range(6)),
    ]
    told = figures.conversations(found)
    saved = figures.savings(told, "similar", "none")
    assert saved == pytest.approx([0.5 - trace / 40 for trace in range(6)])
    result = figures.result(figures.Measured(taken=found))
    summary = result["summary"]
    assert summary["latency_saving_over_none"] == pytest.approx(0.4375)
    assert summary["latency_saving_over_none_low"] == pytest.approx(0.375)
    assert summary["latency_saving_over_prefix"] is None
    assert summary["work_saving_over_none"] == pytest.approx(0.2)
    assert summary["work_similar"] == 0.8
    assert (summary["success_full"], summary["success_similar"]) == (1.0, 0.5)
    assert summary["similar_tokens_share"] == 0.25
    assert "boundary_kl_p95" not in summary, "nothing measures it"
    row = next(row for row in result["rows"] if row.get("arm") == "similar")
    assert (row["conversations"], row["steps"], row["tool_success"]) == (6, 12, 0.5)
    assert row["task_success"] == 0.0, "the last step is the answer"


def test_speedups_are_by_what_was_found() -> None:
    found = [taken("none", it, 0, 2.0, 1.0) for it in range(2)]
    found += [taken("similar", it, 0, 1.0 - it / 2, 1.0, equal=60 * it) for it in range(2)]
    rows = [it for it in figures.result(figures.Measured(found))["rows"] if "speedup_of" in it]
    assert [(row["found"], row["ttft_speedup"]) for row in rows] == [
        ("0.00 to 0.25", 2.0),
        ("0.50 to 0.70", 4.0),
    ]


def test_reruns_and_free_conversations_and_distances_have_rows() -> None:
    measured = figures.Measured(
        reruns={"none": [["aa", "ab"]], "similar": [["aa", "bb"]]},
        free=[Free("single", i, 0, "similar", 4, 3, float(i), 2.0) for i in range(2)],
        apart=[
            Apart("single", i, 0, 0, "similar-close", 0.2 * i, 0.1 * i, 1.0, Tokens(100), False)
            for i in range(2)
        ],
    )
    rows = figures.result(measured)["rows"]
    by_key = {next(iter(row)): row for row in rows}
    assert by_key["reruns_of"]["levenshtein"] == 1.0
    assert by_key["reruns_of"]["from_none_same_seed"] == 0.25
    assert by_key["free"]["calls_without_error"] == 0.75
    assert by_key["free"]["task_success"] == 0.5
    assert by_key["distance_of"]["first_kl_max"] == 0.2
    assert str(figures.result(measured)["summary"]["h4"]).startswith("open: n = 2 traces")


def test_arms_share_nothing_in_the_engine_that_compares_them() -> None:
    """Exact blocks are found in every namespace: only a salt keeps them apart."""
    counts = ("reused_tokens", "similar_tokens", "prefix_tokens", "computed_share", "in_full")
    report = dict.fromkeys((*counts, "accepted_segments", "rejected_segments"), 0)
    salts: dict[str | None, set[str | None]] = {}

    class Lab:
        class llm:  # noqa: N801
            get_tokenizer = staticmethod(Letters)
            reset_prefix_cache = staticmethod(lambda: True)

        def ask(
            self, prompt: list[int], most: int, extra_args: Any, forced: Any = (), salt: Any = None
        ) -> Any:
            space = None if extra_args is None else extra_args["extra_keys"][0]
            salts.setdefault(space, set()).add(salt)
            return SimpleNamespace(tokens=[0], logits=[torch.zeros(3)], report=report)

    trace = traces.draw("quotes", 0, "tuning")
    compared = [arms.ARMS["content"], arms.ARMS["similar"]]
    steps = [*distance.measure(Lab(), trace, compared)]
    assert len(steps) == len(trace.requests)
    of_full = salts.pop(None)
    assert len(of_full) == len(trace.requests)
    assert [len(each) for each in salts.values()] == [1, 1]
    assert len(set.union(of_full, *salts.values())) == len(of_full) + 2


class Talkative:
    """An engine that says what is right, but for one arm at one step."""

    class llm:  # noqa: N801
        get_tokenizer = staticmethod(Letters)
        reset_prefix_cache = staticmethod(lambda: True)

    def __init__(self, *asked: traces.Trace) -> None:
        self.salts: dict[str | None, set[str]] = {}
        self._labels = {
            trace.number: [trace.label(request).label for request in trace.requests]
            for trace in asked
        }
        self._asked: dict[tuple[str | None, int], int] = {}

    def ask(self, prompt: list[int], most: int, extra_args: Any, salt: Any = None) -> Any:
        space = None if extra_args is None else extra_args["extra_keys"][0]
        self.salts.setdefault(space, set()).add(salt)
        at = space, int(salt.split()[1])
        step = self._asked[at] = self._asked.get(at, -1) + 1
        label = self._labels[at[1]][step]
        assert most > len(label)
        wrong = step == 2 and space is not None and "content" in space
        said = tuple(map(ord, "nothing" if wrong else label))
        counts = ("reused_tokens", "similar_tokens", "prefix_tokens", "computed_share")
        report = None if space is None else dict.fromkeys(counts, 0)
        return SimpleNamespace(tokens=said, report=report, cached_tokens=0)


def test_success_is_paired_with_full_prefill() -> None:
    trace = traces.draw("quotes", 0, "tuning")
    compared = [arms.ARMS["content"], arms.ARMS["similar"]]
    lab = Talkative(trace)
    found = [it for step in success.measure(lab, trace, compared) for it in step]
    assert len(found) == 2 * len(trace.requests)
    assert [len(each) for each in lab.salts.values()] == [1, 1, 1]
    assert len(set.union(*lab.salts.values())) == 3
    wrong = [it for it in found if not it.score]
    assert [(it.arm, it.full, it.same) for it in wrong] == [("content", 1.0, False)]
    result = figures.result(figures.Measured(paired=found))
    rows = {row["success_of"]: row for row in result["rows"] if "success_of" in row}
    steps = [len(it.episode.steps) for it in trace.conversations]
    counted = [rows["content"][what] for what in ("traces", "conversations", "steps")]
    assert counted == [1, 3, sum(steps)]
    assert rows["content"]["lost"] == pytest.approx(1 / sum(steps), abs=1e-4)
    assert (rows["content"]["right_in_full_only"], rows["content"]["right_in_arm_only"]) == (1, 0)
    assert rows["content"]["lost_low"] < 0 < rows["content"]["lost_high"]
    assert (rows["similar"]["same"], rows["similar"]["right"]) == (1.0, 1.0)
    said = str(result["summary"]["h1"])
    assert said.startswith("open: latency of 0 traces, too few (open), n = 1 traces, success lost")


def paired(number: int, steps: int, lost: int, conversations: int = 1) -> list[Paired]:
    """Of each trace, steps of which full prefill has all right, and `similar` loses some."""
    return [
        Paired(
            *("users", trace, conversation, step, "similar", 1.0, float(step >= lost)),
            step >= lost,
            Tokens(100),
        )
        for trace in range(number)
        for conversation in range(conversations)
        for step in range(steps)
    ]


def test_success_counts_traces_however_many_conversations_and_steps_they_have() -> None:
    def row(*of: Any) -> dict[str, Any]:
        rows = figures.result(figures.Measured(paired=paired(*of)))["rows"]
        return next(row for row in rows if "success_of" in row)

    short, long, wide = row(20, 1, 0), row(20, 50, 0), row(20, 1, 0, 3)
    assert (short["steps"], long["steps"], wide["steps"]) == (20, 1000, 60)
    assert (short["conversations"], wide["conversations"]) == (20, 60)
    for name in ("traces", "lost", "lost_low", "lost_high"):
        assert short[name] == long[name] == wide[name]
    mixed = [*paired(1, 1, 1), *(replace(it, trace=1) for it in paired(1, 9, 0))]
    (one,) = (it for it in figures.result(figures.Measured(paired=mixed))["rows"] if "same" in it)
    assert (one["full"], one["right"], one["lost"]) == (1.0, 0.5, 0.5), "each weighs as much"


def test_h1_takes_no_steps_and_no_conversations_for_traces() -> None:
    told = [
        replace(taken(arm, trace, 0, seconds, 1.0), conversation=conversation)
        for trace in range(8)
        for conversation in range(3)
        for arm, seconds in (("none", 2.0), ("similar", 1.0))
    ]

    def h1(number: int, steps: int, conversations: int) -> str:
        measured = figures.Measured(told, paired=paired(number, steps, 0, conversations))
        return str(figures.result(measured)["summary"]["h1"])

    # As many traces as in docs/similar.md, which gives this interval: no step was lost, and yet.
    found = h1(32, 6, 3)
    assert found.startswith("open: n = 8 traces, latency saved 0.500")
    assert "n = 32 traces, success lost 0.000 (-0.114 to 0.114) (open)" in found
    assert h1(400, 1, 1).startswith("held")


def served(told: dict[str, list[tuple[str, float]]]) -> list[harness.Row]:
    """Rows of single conversations of an arm: name, and seconds."""
    return [
        {"conversation": name, "under": arm, "seconds": seconds, "right": 1.0}
        for arm, conversations in told.items()
        for name, seconds in conversations
    ]


def test_latency_of_older_files_is_computed_anew_by_trace() -> None:
    names = [f"users {trace} {number}" for trace in range(8) for number in range(3)]
    rows = served(
        {
            "none": [(name, 2.0 + 4.0 * (name[-1] == "2")) for name in names],
            "similar": [(name, 1.0 + 4.0 * (name[-1] == "2")) for name in names],
        }
    )
    old = {"h1": "held: n = 24 conversations", "latency_saving_over_none": 0.5, "seed": 1}
    anew = by_trace.summary(old, rows)
    assert anew["latency_saving_over_none"] == 0.3, "three seconds of ten"
    assert anew["h1"].startswith("open: n = 8 traces, latency saved 0.300 (0.300 to 0.300) (held)")
    assert anew["h1_latency"] == "held: n = 8 traces, latency saved 0.300 (0.300 to 0.300)"
    assert (anew["traces"], anew["seed"]) == (8, 1)
    assert anew["latency_saving_over_prefix"] is None
    assert by_trace.summary(anew | {"h1": "mine"}, rows)["h1"] == "mine", "it counts traces"
    assert by_trace.summary(old, [{"success_of": "similar"}]) == old, "nothing to count"


def test_a_verdict_by_steps_is_not_joined_with_latency_by_trace() -> None:
    rows = served({arm: [(f"single {i} 0", 1.0) for i in range(6)] for arm in ("none", "similar")})
    anew = by_trace.summary({"h1": "held: n = 496 steps"}, [*rows, {"success_of": "similar"}])
    assert "h1" not in anew
    assert anew["h1_latency"].startswith("failed: n = 6 traces, latency saved 0.000")


def test_what_is_read_of_a_file_is_what_the_run_itself_says() -> None:
    found = [
        replace(taken(arm, trace, 0, seconds + trace + number, 1.0), conversation=number)
        for trace in range(7)
        for number in range(2)
        for arm, seconds in (("none", 9.0), ("similar", 2.0))
    ]
    result = figures.result(figures.Measured(taken=found))
    older = {name: it for name, it in result["summary"].items() if name != "traces"}
    older |= {"latency_saving_over_none": 0, "h1": "", "h1_latency": ""}
    assert by_trace.summary(older, result["rows"]) == result["summary"]


def test_a_run_goes_on_behind_the_traces_that_it_has_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.english import engine

    started: list[Talkative] = []
    load = command.load_of(
        command.argument_parser().parse_args(
            ["--model", "m", "--kinds", "quotes", "--compared", "similar", "--distant", "2"]
        )
    )
    of_load = [traces.draw("quotes", number, load.seeds) for number in range(2)]

    @contextmanager
    def talking(*_: Any, **__: Any) -> Iterator[Any]:
        lab = Talkative(*of_load)
        started.append(lab)
        yield lab

    monkeypatch.setattr(engine, "english_engine", talking)
    file, setting = tmp_path / "run.jsonl", {"model": "m"}

    def go_on(commit: str = "abc", any_commit: bool = False) -> Iterator[list[Any]]:
        compared = Compared(file, setting, commit, any_commit)
        return command.in_process(Path("m"), load, command.SUCCESS, compared)

    stopped = go_on()
    count = len(of_load[0].requests)
    first = [it for _ in range(count + 1) for it in next(stopped)]
    stopped.close()
    again = go_on()
    assert next(again) == first[:count], "what was measured, as it was"
    assert len(started) == 1
    rest = [it for steps in again for it in steps]
    assert [it.trace for it in rest] == [1] * len(of_load[1].requests)
    assert rest[0].step == of_load[1].requests[0].step, "from its beginning"
    assert len([*go_on()]) == 2
    assert len(started) == 2, "nothing is missing: no engine starts"
    with pytest.raises(RecordsError, match="at commit abc, this is def: go on with --resume"):
        go_on("def")
    assert len([*go_on("def", any_commit=True)]) == 2
    with pytest.raises(RecordsError, match="with model m, not another"):
        Compared(file, {"model": "another"}, "abc")
    with file.open("a") as out:
        out.write('{"part": "success"}\n')
    with pytest.raises(RecordsError, match="line 4 is no record of this version"):
        go_on()


# Verdicts.


def test_h1_needs_latency_and_success() -> None:
    same, many = [1.0] * 400, [0.5] * 400
    assert verdicts.h1(many, same, same).verdict == "held"
    assert verdicts.h1([0.1] * 400, same, same).verdict == "failed"
    assert verdicts.h1(many, same, [0.5] * 400).verdict == "failed"
    few = verdicts.h1([0.5] * 10, [1.0] * 10, [1.0] * 10)
    assert few.verdict == "open", "so few traces may lose more than 2 points"
    assert "n = 10 traces" in str(few)
    assert verdicts.h1([0.5] * 5, [1.0] * 5, [1.0] * 5).verdict == "open"
    more_scored = verdicts.h1([0.5] * 10, same, same)
    assert more_scored.verdict == "held"
    assert "n = 400 traces, success lost" in str(more_scored)
    assert "success was not measured" in str(verdicts.h1(many, [], []))


def test_h2_is_of_accepted_segments_and_h4_of_all_that_a_test_lets_pass() -> None:
    def apart(arm: str, trace: int, kl: float, accepted: int) -> Apart:
        return Apart("single", trace, 0, 0, arm, kl, kl, 1.0, Tokens(100), False, accepted, 2)

    close = [apart("similar-close", 0, 3.0, 0)]
    tested = [apart("similar-tested", trace, 0.01, 1) for trace in range(9)]
    tested += [apart("similar-tested", 9, 0.1, 0)]
    summary = figures.result(figures.Measured(apart=[*close, *tested]))["summary"]
    assert summary["boundary_kl_p95"] == 0.01
    assert str(summary["h2"]).startswith("open: n = 9 traces, share of 0.1 nats or more 0.000")
    assert str(summary["h4"]).startswith("open: n = 10 traces, share of 0.1 nats or more 0.100")
    rows = figures.result(figures.Measured(apart=tested))["rows"]
    row = next(row for row in rows if row.get("distance_of") == "similar-tested")
    assert (row["accepted"], row["rejected"]) == (9, 20)
    assert "boundary_kl_p95" not in figures.result(figures.Measured(apart=close))["summary"]


def test_h4_and_distances_take_no_steps_and_no_conversations_for_traces() -> None:
    apart = [
        Apart("users", trace, number, step, "similar-tested", 0.0, kl, 1.0, Tokens(100), False)
        for trace, kl in enumerate((0.1, 0.2, 0.4))
        for number in range(3)
        for step in range(9)
    ]
    result = figures.result(figures.Measured(apart=apart))
    assert str(result["summary"]["h4"]).startswith("open: n = 3 traces")
    row = next(row for row in result["rows"] if "distance_of" in row)
    assert (row["traces"], row["conversations"], row["steps"]) == (3, 9, 81)
    alone = [it for it in apart if it.conversation == it.step == 0]
    (again,) = (it for it in figures.result(figures.Measured(apart=alone))["rows"] if "work" in it)
    for name in ("answer_kl_low", "answer_kl_high"):
        assert row[name] == again[name]


def test_h2_is_open_until_it_is_measured() -> None:
    assert str(verdicts.h2([])) == "open: not measured"
    assert verdicts.h2([0.0] * 200).verdict == "held"
    assert verdicts.h2([1.0] * 200).verdict == "failed"


def test_h3_is_of_the_whole_interval() -> None:
    assert verdicts.h3(95, 100).verdict == "held"
    assert verdicts.h3(75, 100).verdict == "open"
    assert verdicts.h3(30, 100).verdict == "failed"
    assert verdicts.h3(0, 0).verdict == "open"


def test_h4_is_of_what_a_fallback_leaves() -> None:
    assert verdicts.h4([0.0] * 200).verdict == "held"
    assert verdicts.h4([0.0] * 20).verdict == "open"
    assert verdicts.h4([0.0] * 100 + [1.0] * 100).verdict == "failed"


# The command.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model", "/nowhere"], "no model in /nowhere"),
        (["--arms", "all"], "no arm 'all'"),
        (["--kinds", "mixed"], "no kind 'mixed'; there are single, users, clock, quotes"),
        (["--traces", "-1"], "--traces -1"),
        (["--compared", "prefix"], "--compared: prefix reuses no segments"),
        (["--parts", "half"], "no part 'half'"),
    ],
)
def test_bad_input_is_one_sentence(
    given: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--model" not in given:
        monkeypatch.setattr(command, "require_model", lambda model: None)
        given = [*given, "--model", "m"]
    assert command.main(given) == 2
    assert said in capsys.readouterr().err


def test_retrieval_is_what_the_other_suite_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.suites import similar

    rows = [{"edited_words": 0, "precision": 1.0}, {"alignment": "ours"}]
    total = {"edited_words": "all", "precision": 0.9, "recall": 0.8, "pairs": 50}
    found: harness.SuiteResult = {"rows": [*rows, total], "summary": {"arrival_ms_hit": 3.0}}
    monkeypatch.setattr(similar, "run", lambda quick: found)
    measured = figures.Measured(similar=command.retrieval(quick=True))
    summary = figures.result(measured)["summary"]
    assert (summary["precision_tau80"], summary["recall_tau80"]) == (0.9, 0.8)
    assert summary["arrival_ms"] == 3.0
    assert str(summary["h3"]).startswith("held: n = 50 pairs, precision 0.900")
    assert "pairs" not in summary


class Laboratory:
    """Stands for servers: every arm says what is right, and takes its own time."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.left = interrupt_at

    def trace(
        self, trace: traces.Trace, arm: arms.Arm, temperature: float = 0.0, seed: int | None = None
    ) -> list[Taken]:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        seconds = 2.0 if arm.name == "none" else 1.0
        return [
            Taken(
                *(trace.kind, trace.number, it.conversation, it.step, arm.name),
                Answered(trace.label(it).label, seconds / 2, seconds, Tokens(10, computed=10)),
                1.0,
            )
            for it in trace.requests
        ]

    def free(self, trace: traces.Trace, conversation: int, arm: arms.Arm) -> Free:
        return Free(trace.kind, trace.number, conversation, arm.name, 6, 6, 1.0, 9.0)


def run_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, lab: Laboratory, *args: str
) -> tuple[int, dict[str, Any]]:
    from contextlib import nullcontext

    from transformers import AutoTokenizer

    from bench.agents import serving

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder: Letters())
    monkeypatch.setattr(serving, "asking", lambda *_: nullcontext(lab))
    monkeypatch.delenv("BENCH_QUALITY_SEEDS", raising=False)
    file = tmp_path / "agents.json"
    given = ["--model", str(tmp_path), "--parts", "serving", "--json", str(file), *args]
    status = command.main(given)
    return status, json.loads(file.read_text())


def test_a_run_has_rows_of_all_that_was_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    status, result = run_with(monkeypatch, tmp_path, Laboratory(), "--quick")
    assert status == 0
    assert result["suite"] == "agents"
    assert result["summary"]["latency_saving_over_none"] == 0.5
    assert result["summary"]["conversations"] == 10
    assert result["summary"]["seeds"] == "reporting"
    assert result["summary"]["seed"] == seeds.SETS["reporting"]
    served = [row for row in result["rows"] if "trace" in row]
    assert len(served) == (len(traces.KINDS) + 1) * len(arms.ARMS)
    assert [row["reruns_of"] for row in result["rows"] if "reruns_of" in row] == [*arms.ARMS]


def test_an_interrupted_run_says_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (_, first), *_ = arms.by_server([*arms.ARMS.values()])
    done = len(first) * 3 + 1  # warm-up, two traces, and one arm of the third
    status, result = run_with(monkeypatch, tmp_path, Laboratory(interrupt_at=done))
    assert status == 130
    assert result["environment"]["interrupted"] is True
    kinds = {row["trace"] for row in result["rows"] if "trace" in row}
    assert kinds == {"single", "users", "all"}, "a trace counts once all arms have been asked"


def test_nothing_new_begins_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*command.within(None, [1, 2, 3], "steps", 3)] == [1, 2, 3]
    assert [*command.within(60, [1, 2, 3], "steps", 3)] == [1, 2, 3]
    assert [*command.within(0, [1, 2, 3], "steps", 3)] == [1]
    assert "the time is over after 1 of 3" in capsys.readouterr().err
