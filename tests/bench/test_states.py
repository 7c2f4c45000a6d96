# SPDX-License-Identifier: Apache-2.0
"""What `bench states` makes of engines, with some that are made up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench import engine, shapes
from bench.harness import BenchError
from bench.suites import states

MS = {"none": 3000.0, "prefix": 3200.0, "shift": 160.0, "focus": 1000.0}
FACTS = states.Facts(map_bytes=3 << 20, token_bytes=4096.0, block_tokens=256)


class Apart:
    """Answers at once; what it says can be spoilt."""

    def __init__(self, name: str, spoilt: dict[str, Any]) -> None:
        self.name, self.facts = name, FACTS if name == "reusing" else None
        self.asked: list[tuple[list[int], Any]] = []
        self._spoilt = spoilt

    def first_token(self, prompt: list[int], options: Any) -> engine.Timed:
        self.asked.append((prompt, options))
        policy = (options or {}).get("segreuse_policy")
        # The machine becomes slower all the time, for all of them.
        ms = MS[policy or ("prefix" if self.name == "reusing" else self.name)] * len(self.asked)
        report = {
            "policy": policy,
            "reused_tokens": states.KNOWN_TOKENS,
            "recomputed_tokens": 2 * states.DOCUMENT_TOKENS if policy == "focus" else 0,
            "computed_share": 0.02,
        }
        found = engine.Timed(ms, 1, 0, report if options else None)
        mine = self._spoilt.get(policy or self.name)
        return found if mine is None else mine(found)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[dict[str, Apart]]]:
    """What is spoilt, and the engines of each start."""
    spoilt: dict[str, Any] = {}
    starts: list[dict[str, Apart]] = []

    @contextmanager
    def started() -> Iterator[dict[str, Apart]]:
        starts.append({name: Apart(name, spoilt) for name in states.ENGINES})
        yield starts[-1]

    monkeypatch.setattr(states, "started", started)
    monkeypatch.setattr(shapes, "make_model", lambda name: name)
    return spoilt, starts


def test_summary_and_rows(made_up: tuple[dict[str, Any], list[dict[str, Apart]]]) -> None:
    result = states.run(quick=False)
    summary = result["summary"]
    assert summary["known_share"] == pytest.approx(0.98, abs=1e-3)
    assert summary["rounds"] == states.FULL.starts * states.FULL.rounds
    assert len(result["rows"]) == states.FULL.starts * len(states.ARMS)
    assert summary["map_mib"] == 3
    assert summary["map_in_tokens"] == 768
    assert summary["map_over_document_kv"] == pytest.approx(768 / 512)
    for name in ("shift_speedup", "focus_speedup_over_none", "prefix_speedup_over_none"):
        low, middle, high = (float(summary[f"{name}{end}"]) for end in ("_low", "", "_high"))
        assert low <= middle <= high


def test_a_speed_up_is_of_a_round_over_all_starts(
    made_up: tuple[dict[str, Any], list[dict[str, Apart]]],
) -> None:
    of_a_start = 3 + states.FULL.rounds
    # From the last round of the first start on.
    slow = iter([1.0] * (of_a_start - 1) + [4.0] * 99)
    made_up[0]["prefix"] = lambda timed: timed._replace(ms=1000.0)
    made_up[0]["none"] = lambda timed: timed._replace(ms=1000.0 * next(slow))
    summary = states.run(quick=False)["summary"]
    assert summary["prefix_speedup_over_none"] == 4
    assert summary["prefix_speedup_over_none_low"] == 1


def test_what_is_asked(made_up: tuple[dict[str, Any], list[dict[str, Apart]]]) -> None:
    states.run(quick=True)
    [engines] = made_up[1]
    reads = {name: [it[0] for it in of_name.asked[:2]] for name, of_name in engines.items()}
    assert reads["none"] == reads["prefix"] == reads["reusing"]
    asked = [one for of_name in engines.values() for one in of_name.asked[2:]]
    assert {len(prompt) for prompt, _ in asked} == {states.PROMPT_TOKENS}
    assert len({tuple(prompt[:16]) for prompt, _ in asked}) == len(asked), "each is new"
    policies = [options["segreuse_policy"] for _, options in engines["reusing"].asked[2:]]
    assert {*policies} == {"shift", "focus"}
    assert not any(options for name in ("none", "prefix") for _, options in engines[name].asked)


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("prefix", {"cached_tokens": 256}, "256 tokens were cached"),
        ("shift", {"report": None}, "no segreuse report"),
        ("shift", {"reused_tokens": 512}, "reuse at least 4096"),
        ("focus", {"recomputed_tokens": 512}, "was to read 1024 tokens again"),
        ("shift", {"recomputed_tokens": 512}, "was to read 0 tokens again"),
    ],
)
def test_another_work_is_refused(
    made_up: tuple[dict[str, Any], list[dict[str, Apart]]],
    name: str,
    changes: dict[str, Any],
    complaint: str,
) -> None:
    def spoil(timed: engine.Timed) -> engine.Timed:
        if changes.keys() & {*engine.Timed._fields}:
            return timed._replace(**changes)
        return timed._replace(report={**(timed.report or {}), **changes})

    made_up[0][name] = spoil
    with pytest.raises(BenchError, match=complaint):
        states.run(quick=True)


def test_documents_are_as_many_tokens_as_two_of_them_may_be_read_again() -> None:
    """`focus` reads a quarter of what is known: two of eight."""
    prompt = states.Prompts(0).next()
    assert len(prompt) == states.PREAMBLE_TOKENS + states.KNOWN_TOKENS + states.QUESTION_TOKENS
    assert 2 * states.DOCUMENT_TOKENS == 0.25 * states.KNOWN_TOKENS
