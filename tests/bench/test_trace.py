# SPDX-License-Identifier: Apache-2.0
"""A trace through servers, beside its estimate: what is sent, and what becomes of the answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.agents.tokens import Tokens
from bench.harness import BenchError
from bench.trace import command, estimating, serving
from bench.trace.figures import complete, interval, result_of
from bench.trace.serving import CLOSED, MOST_WAIT_S, PREFIX, TIMED, Turn, sent_at
from bench.trace.slices import FIRST_TEXT_TOKEN, Slice, TracePrompt, at_a_time
from tests.estimate.test_traces import ragpulse, write_ragpulse

VOCABULARY = 1000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three prompts, of which the last two have a passage in common; a second between them."""
    passages = [[0, 1], [2, 3], [3, 4]]
    lines = [ragpulse(number, ids, number) for number, ids in enumerate(passages)]
    return write_ragpulse(tmp_path, lines, tokens=64)


def sliced(path: Path, **others: Any) -> list[TracePrompt]:
    usual = {"start": 0, "count": 3, "token_scale": 1.0, "most_answer_tokens": 4}
    return Slice(**(usual | {"vocabulary": VOCABULARY} | others)).prompts(path)


def places(prompt: TracePrompt) -> dict[int, list[int]]:
    """Tokens of each part, by its id."""
    stops = np.cumsum([part.tokens for part in prompt.parts]).tolist()
    return {
        part.id: prompt.tokens[stop - part.tokens : stop]
        for part, stop in zip(prompt.parts, stops, strict=True)
    }


def test_equal_parts_are_equal_tokens_of_the_vocabulary(trace: Path) -> None:
    first, second, third = (places(prompt) for prompt in sliced(trace))
    [shared] = [id for id in second.keys() & third.keys() if id not in first]
    assert second[shared] == third[shared]
    distinct = {tuple(tokens) for some in (first, second, third) for tokens in some.values()}
    assert len(distinct) == len(first.keys() | second.keys() | third.keys())
    everything = [token for prompt in sliced(trace) for token in prompt.tokens]
    assert min(everything) >= FIRST_TEXT_TOKEN
    assert max(everything) < VOCABULARY


def test_scaled_parts_begin_as_the_whole_ones_do(trace: Path) -> None:
    for whole, half in zip(sliced(trace), sliced(trace, token_scale=0.5), strict=True):
        for id, tokens in places(half).items():
            assert 1 <= len(tokens) == max(1, round(len(places(whole)[id]) / 2))
            assert places(whole)[id][: len(tokens)] == tokens


def test_a_slice_begins_where_it_is_asked_to(trace: Path) -> None:
    assert [it.tokens for it in sliced(trace, start=1, count=2)] == [
        it.tokens for it in sliced(trace)[1:]
    ]
    assert [it.time_s for it in sliced(trace, start=1, count=2)] == [0, 1]
    assert {it.answer_tokens for it in sliced(trace)} == {4}
    with pytest.raises(BenchError, match="has 2 requests behind the first 1"):
        sliced(trace, start=1)
    with pytest.raises(BenchError, match="cannot read"):
        sliced(trace.parent / "nothing.jsonl")


def test_turns_have_times_of_their_own_without_long_pauses(trace: Path) -> None:
    turns = at_a_time(sliced(trace), 2)
    assert [[prompt.time_s for prompt in some] for some in turns] == [[0, 1], [0]]
    assert sent_at([0, 1, 1, 5000, 5001]) == [0, 1, 1, 1 + MOST_WAIT_S, 2 + MOST_WAIT_S]


@pytest.mark.slow
def test_the_estimate_is_of_the_tokens_that_are_sent(trace: Path) -> None:
    prompts = sliced(trace)
    total = sum(len(prompt.tokens) for prompt in prompts)
    row = estimating.of_slice(prompts, "shift", blocks=100, block_size=16, layers=4)
    shared = sum(
        part.tokens
        for at, prompt in enumerate(prompts)
        for part in prompt.parts
        if any(part in earlier.parts for earlier in prompts[:at])
    )
    assert row.whole_any_position_share == pytest.approx(shared / total)
    assert row.prefix_share <= row.any_position_share <= shared / total
    assert row.any_position_prefix_share == row.prefix_share


def turn(passed: str, number: int, arm: str, seconds: float, found: int) -> Turn:
    return Turn(passed, number, arm, seconds, (seconds,) * 3, Tokens(100, 20, found, 0, 80 - found))


def turns(count: int) -> list[Turn]:
    """The plugin takes half of the time, and knows half of the prompts."""
    return [
        turn(passed, number, arm, (number + 1.0) * factor, found)
        for passed in (TIMED, CLOSED)
        for number in range(count)
        for arm, factor, found in ((PREFIX, 2.0, 0), ("shift", 1.0, 30))
    ]


def test_the_summary_has_the_shares_by_size_and_the_ratios(trace: Path) -> None:
    sizes = (1000, None)
    name, requests, _, whole = estimating.of_whole(trace, sizes, ("shift",))
    assert (name, requests) == ("RAGPulse", 3)
    estimated = {"shift": estimating.of_slice(sliced(trace), "shift", 100, 16, 4)}
    result = result_of(turns(6), estimated, whole)
    assert [*result["summary"]] == [
        *("prefix_share", "any_position_share", "engine_minus_estimate"),
        *("ttft_over_prefix", "throughput_over_prefix"),
    ]
    shares: Any = result["summary"]["any_position_share"]
    assert shares == {
        "1K": whole[0].whole_any_position_share,
        "unlimited": pytest.approx(whole[1].whole_any_position_share),
    }
    assert result["summary"]["ttft_over_prefix"] == 0.5
    assert result["summary"]["throughput_over_prefix"] == 2.0
    rows = {(row["of"], row.get("pass"), row.get("arm")): row for row in result["rows"]}
    served = rows["engine", TIMED, "shift"]
    assert (served["prefix_share"], served["known_share"], served["work"]) == (0.2, 0.5, 0.5)
    found = estimated["shift"]
    assert served["estimated_known_share"] == pytest.approx(found.any_position_share)
    gaps = [
        0.5 - served["estimated_known_share"],
        0.2 - rows["engine", TIMED, PREFIX]["estimated_known_share"],
    ]
    assert result["summary"]["engine_minus_estimate"] == pytest.approx(max(gaps, key=abs))
    ratios = rows["ratios", None, "shift"]
    assert ratios["ttft_over_prefix_low"] <= 0.5 <= ratios["ttft_over_prefix_high"]


def test_turns_that_not_all_arms_have_had_count_for_nothing() -> None:
    some = turns(3)[:-1]
    assert complete(some, (PREFIX, "shift")) == some[:-1]
    assert complete(some[:7], (PREFIX, "shift")) == some[:6]


def test_the_interval_is_of_turns_not_of_requests() -> None:
    pairs = [
        (turn(TIMED, n, "shift", 1.0 + n % 2, 0), turn(TIMED, n, PREFIX, 2.0, 0)) for n in range(20)
    ]
    low, high = interval(pairs, lambda some: sum(mine.seconds for mine, _ in some) / len(some))
    assert 1.2 < low < 1.5 < high < 1.8
    assert interval(pairs[:1], lambda some: len(some)) == (1.0, 1.0)


def test_without_an_engine_the_whole_trace_is_estimated(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "replayed", None)
    file = tmp_path / "trace.json"
    given = ["--requests", "0", "--cache-sizes", "1K,unlimited", "--json", str(file)]
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 1000, "num_hidden_layers": 4}))
    (model / "model.safetensors").write_bytes(b"")
    assert command.main(["--trace", str(trace), "--model", str(model), *given]) == 0
    result = json.loads(file.read_text())
    assert result["suite"] == "trace"
    assert [row["cache"] for row in result["rows"]] == ["1K", "unlimited"]
    assert result["summary"]["ttft_over_prefix"] is None
    assert result["environment"]["all_requests"] == 3
    assert command.main(["--trace", str(model), "--model", str(model), *given]) == 1
    assert "bench trace: " in capsys.readouterr().err
    assert command.main(["--trace", str(trace), "--model", str(tmp_path), *given]) == 2


def test_only_policies_that_find_text_can_be_arms() -> None:
    with pytest.raises(SystemExit):
        command.main(["--trace", "x", "--policies", "shift,exact"])
