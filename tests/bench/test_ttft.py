# SPDX-License-Identifier: Apache-2.0
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench import engine, shapes
from bench.harness import BenchError
from bench.suites import ttft

REUSED = ttft.DOCUMENTS * ttft.DOCUMENT_TOKENS
MS = {"full": 1000.0, "shift": 50.0, "sparsex": 200.0, "hybrid": 250.0, "prophet": 400.0}
MS |= {"focus": 125.0, "default": 500.0, "hit": 40.0}
SHARES = {"shift": 0.01, "sparsex": 0.12, "hybrid": 0.24, "prophet": 0.13}
SHARES |= {"focus": 0.12, "default": 0.3}
CONTEXT = ttft.PROMPT_TOKENS - ttft.QUESTION_TOKENS

Answer = Callable[[ttft.Mode], engine.Timed]


def _timed(mode: ttft.Mode, **changes: Any) -> engine.Timed:
    if mode.policy is None:
        return engine.Timed(MS[mode.name], 1, CONTEXT if mode.cached else 0, None)
    report = {
        "policy": mode.policy,
        "reused_tokens": REUSED,
        "recomputed_tokens": round(mode.recompute_ratio * REUSED),
        "computed_share": SHARES[mode.name],
    }
    return engine.Timed(MS[mode.name], 1, 0, report | changes)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Puts a function in the place of the engine."""

    @contextlib.contextmanager
    def no_engine(*args: Any, **options: Any) -> Iterator[None]:
        yield None

    def install(function: Answer) -> None:
        known: list[list[int]] = []

        def first_token(
            llm: None, prompt: list[int], extra_args: dict[str, Any] | None = None
        ) -> engine.Timed:
            options = dict(extra_args or {})
            if len(prompt) != ttft.PROMPT_TOKENS:
                known.append(prompt)
                return engine.Timed(1.0, 1, 0, None)
            cached = prompt[:CONTEXT] in known
            mode = next(
                m for m in ttft.MODES if (m.extra_args() or {}) == options and m.cached == cached
            )
            return function(mode)

        monkeypatch.setattr(engine, "prepare_environment", lambda gib: None)
        monkeypatch.setattr(shapes, "make_model", lambda name: name)
        monkeypatch.setattr(engine, "engine", no_engine)
        monkeypatch.setattr(engine, "first_token", first_token)

    return install


def test_summary_has_the_documented_figures(answer: Callable[[Answer], None]) -> None:
    answer(_timed)
    summary = ttft.run(quick=False)["summary"]
    modes = ("full", "shift", "sparsex", "hybrid", "prophet", "focus", "default", "hit")
    keys = [f"{mode}_ms" for mode in modes]
    keys += [f"{mode}_speedup{end}" for mode in modes[1:] for end in ("", "_low", "_high")]
    keys += ["shift_against_hit", "hybrid_efficiency"]
    assert list(summary) == keys + [f"{key}_deep" for key in keys]
    assert summary["shift_speedup"] == 20
    assert summary["sparsex_speedup_deep"] == 5
    assert summary["shift_against_hit"] == 50 / 40
    assert summary["hybrid_efficiency"] == pytest.approx(1000 * 0.24 / 250)


def test_a_speed_up_and_its_interval_are_of_the_rounds(answer: Callable[[Answer], None]) -> None:
    # In one round everything took ten times as long: no ratio of a round changes.
    turns = {mode.name: 0 for mode in ttft.MODES}

    def timed(mode: ttft.Mode) -> engine.Timed:
        turns[mode.name] += 1
        slow = 10 if turns[mode.name] == 3 else 1
        noise = 1.25 if mode.name == "shift" and turns[mode.name] == 4 else 1
        return _timed(mode)._replace(ms=MS[mode.name] * slow * noise)

    answer(timed)
    summary = ttft.run(quick=True)["summary"]
    assert summary["sparsex_speedup_low"] == summary["sparsex_speedup_high"] == 5
    # Six rounds: the interval is their whole range.
    assert summary["shift_speedup_low"] == 16
    assert summary["shift_speedup_high"] == 20


def test_quick_measures_the_small_shape_only(answer: Callable[[Answer], None]) -> None:
    answer(_timed)
    assert {row["shape"] for row in ttft.run(quick=True)["rows"]} == {"bench8"}


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"reused_tokens": REUSED - 1}, "reuse at least 8192"),
        ({"policy": "shift"}, "policy sparsex was to reuse"),
        ({"recomputed_tokens": 3}, "recomputed only 3 of 8192"),
    ],
)
def test_figures_without_the_work_are_refused(
    answer: Callable[[Answer], None], broken: dict[str, Any], complaint: str
) -> None:
    answer(lambda mode: _timed(mode, **(broken if mode.policy == "sparsex" else {})))
    with pytest.raises(BenchError, match=complaint):
        ttft.run(quick=True)


def test_a_request_without_report_is_refused(answer: Callable[[Answer], None]) -> None:
    answer(lambda mode: _timed(mode)._replace(report=None))
    with pytest.raises(BenchError, match="connector is not active"):
        ttft.run(quick=True)


def test_a_cached_baseline_is_refused(answer: Callable[[Answer], None]) -> None:
    answer(lambda mode: _timed(mode)._replace(cached_tokens=32))
    with pytest.raises(BenchError, match="32 of its tokens were cached"):
        ttft.run(quick=True)


def test_a_bound_that_is_not_cached_is_refused(answer: Callable[[Answer], None]) -> None:
    answer(lambda mode: _timed(mode)._replace(cached_tokens=mode.cached * (CONTEXT - 33)))
    with pytest.raises(BenchError, match="33 tokens were not in the prefix cache"):
        ttft.run(quick=True)


def test_prompts_never_share_a_block_sized_prefix() -> None:
    prompts = ttft.Prompts(seed=1)
    drawn = [prompts.next() for _ in range(60)]
    assert {len(prompt) for prompt in drawn} == {ttft.PROMPT_TOKENS}
    prefixes = {tuple(prompt[: engine.BLOCK_TOKENS]) for prompt in drawn}
    assert len(prefixes) == len(drawn)


def test_prompts_hold_every_document_at_an_odd_offset() -> None:
    prompts = ttft.Prompts(seed=1)
    firsts = {tuple(document[:8]) for document in prompts.documents}
    for _ in range(30):
        prompt = prompts.next()
        offsets = [at for at in range(len(prompt)) if tuple(prompt[at : at + 8]) in firsts]
        assert len(offsets) == ttft.DOCUMENTS
        assert all(offset % 2 == 1 for offset in offsets)


def test_a_speed_up_lies_within_its_interval(answer: Callable[[Answer], None]) -> None:
    """The machine slows down from round to round, and one round of `shift` was disturbed: the
    ratio of the medians would be that of two different rounds."""
    turns = {mode.name: 0 for mode in ttft.MODES}

    def timed(mode: ttft.Mode) -> engine.Timed:
        turns[mode.name] += 1
        drift = 2.0 ** turns[mode.name]
        disturbed = 1000 if mode.name == "shift" and turns[mode.name] == 3 else 1
        return _timed(mode)._replace(ms=MS[mode.name] * drift * disturbed)

    answer(timed)
    summary = ttft.run(quick=True)["summary"]
    assert summary["shift_speedup"] == 20
    assert summary["shift_speedup_low"] <= summary["shift_speedup"] <= summary["shift_speedup_high"]
