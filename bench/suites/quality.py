# SPDX-License-Identifier: Apache-2.0
"""What each policy loses against full prefill, and what it computes, on the bundled model.

Every example is asked in full and under every policy, on documents that were computed in other
prompts: differences are paired. `best` is the policy with the highest mean over the four RULER
tasks; of policies that do not differ from it (paired test, p >= 0.05), the one of least work.

A full run has one engine per core. An interrupt (Ctrl-C) ends it early, with what was asked so far.
`BENCH_QUALITY_TASKS=vt,cwe` names the tasks to ask, `BENCH_QUALITY_MODEL=DIR` another model.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from bench import harness
from bench.harness import Row
from bench.quality import statistics
from bench.quality.engine import Arm, Outcome, lab_engine
from bench.quality.tasks import RULER, TASKS, Example, example
from bench.quality.workers import Alone, Workers, alone
from vllm_segreuse.calibrate.search import divergence, most_likely

PROMPT_TOKENS = 2048
SEED = 20260601

FULL = Arm("full", None)
ARMS = (
    FULL,
    Arm("shift", {"policy": "shift"}),
    Arm("epic", {"policy": "epic", "recompute_ratio": 0.15}),
    Arm("cacheblend", {"policy": "cacheblend", "recompute_ratio": 0.15}),
    Arm("sparsex", {"policy": "sparsex", "dense_layers": 0, "recompute_ratio": 0.15}),
    Arm("hybrid", {"policy": "sparsex", "dense_layers": 5, "recompute_ratio": 0.15}),
    Arm("prophet", {"policy": "prophet", "recompute_ratio": 0.1}),
    Arm("prophet 1 %", {"policy": "prophet", "recompute_ratio": 0.01}),
    Arm("prophet 0.5 %", {"policy": "prophet", "recompute_ratio": 0.005}),
    Arm("focus", {"policy": "focus", "recompute_ratio": 0.1}),
    Arm("focus 1 %", {"policy": "focus", "recompute_ratio": 0.01}),
    Arm("focus 0.5 %", {"policy": "focus", "recompute_ratio": 0.005}),
)
PUBLISHED = ("shift", "epic", "cacheblend", "sparsex", "hybrid", "prophet")
FEW = ("focus 0.5 %", "prophet 0.5 %")
"""Ours and the published method closest to it, at the same small share of recomputed tokens."""


@dataclass(frozen=True)
class Load:
    """What is asked: tasks, examples of each, and arms."""

    tasks: tuple[str, ...]
    samples: int
    arms: tuple[Arm, ...]


UNKNOWN_TO_THE_BUNDLED_MODEL = ("mq-vt",)
FULL_LOAD = Load(
    tuple(task for task in TASKS if task not in UNKNOWN_TO_THE_BUNDLED_MODEL), 250, ARMS
)
QUICK_LOAD = Load(
    ("vt",), 20, tuple(arm for arm in ARMS if arm.name in (*PUBLISHED, "full", "focus"))
)

Results = dict[str, list[tuple[Example, dict[str, Outcome]]]]


def run(quick: bool) -> harness.SuiteResult:
    """Ask all examples (`quick`: 20 of one task)."""
    load = QUICK_LOAD if quick else FULL_LOAD
    named = os.environ.get("BENCH_QUALITY_TASKS")
    if named:
        unknown = set(named.split(",")) - set(TASKS)
        if unknown:
            raise harness.BenchError(
                f"BENCH_QUALITY_TASKS: no task {sorted(unknown)}; there are {', '.join(TASKS)}"
            )
        load = replace(load, tasks=tuple(named.split(",")))
    with alone() if quick else Workers() as engines:
        results = ask_all(engines, load)
    return {"rows": list(_rows(results, load.arms)), "summary": _summary(results, load)}


def ask_all(engines: Alone | Workers, load: Load) -> Results:
    """Outcomes by task; layouts of the prompt vary from plain to interleaved."""
    results: Results = {task: [] for task in load.tasks}
    ruler, others = ([t for t in load.tasks if (t in RULER) is first] for first in (True, False))
    steps = [
        (task, number)
        for tasks in (ruler, others)  # the former are what the summary is made of
        for number in range(load.samples)
        for task in tasks
    ]
    answers = engines.ask((_draw(task, number) for task, number in steps), load.arms)
    try:
        for drawn, outcomes in harness.progress(answers, "examples", total=len(steps)):
            results[drawn.task].append((drawn, outcomes))
    except KeyboardInterrupt:
        kept: Results = {}
        for tasks in (ruler, others):
            asked = min((len(results[task]) for task in tasks), default=0)
            if asked:
                kept |= {task: results[task][:asked] for task in tasks}
                print(f"interrupted: {asked} examples of {', '.join(tasks)}", file=sys.stderr)
        if not kept:
            raise
        results = kept
    return results


def _draw(task: str, number: int) -> dict[str, Any]:
    """An example depends on its task and number alone: any part of a run can be repeated."""
    return {
        "task": task,
        "rng": Random(f"{SEED} {task} {number}"),
        "tokens": PROMPT_TOKENS,
        "question_first": number % 4 == 3,
        "interleaved": (0.0, 0.0, 0.5, 1.0)[number % 4],
    }


def _rows(results: Results, arms: Sequence[Arm]) -> Iterator[Row]:
    for task, asked in results.items():
        for arm in arms:
            yield _row(task, arm, [outcomes for _, outcomes in asked])
        by_kind = defaultdict(list)
        for drawn, outcomes in asked:
            by_kind[drawn.kind].append(outcomes)
        if len(by_kind) > 1:
            for kind in sorted(by_kind):
                for arm in arms:
                    yield _row(f"{task}, {kind}", arm, by_kind[kind])
    if all(task in results for task in RULER):
        pooled = [outcomes for task in RULER for _, outcomes in results[task]]
        for arm in arms:
            yield _row("RULER", arm, pooled)


def _row(task: str, arm: Arm, outcomes: list[dict[str, Outcome]]) -> Row:
    mine = [by_arm[arm.name] for by_arm in outcomes]
    full = [by_arm[FULL.name] for by_arm in outcomes]
    scores = [outcome.score for outcome in mine]
    low, high = statistics.interval(scores)
    return {
        "task": task,
        "policy": arm.name,
        "samples": len(mine),
        "accuracy": round(fmean(scores), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "p_against_full": round(statistics.paired_p([o.score for o in full], scores), 4),
        "first_token_kl": round(
            fmean(divergence(a.first, b.first) for a, b in zip(full, mine, strict=True)), 5
        ),
        "top1_agreement": round(
            fmean(
                most_likely(a.first) == most_likely(b.first)
                for a, b in zip(full, mine, strict=True)
            ),
            4,
        ),
        "work": round(fmean(outcome.work for outcome in mine), 4),
        "ttft_ms": round(median(outcome.ttft_ms for outcome in mine), 2),
    }


def _summary(results: Results, load: Load) -> dict[str, float | str]:
    tasks = [task for task in RULER if task in results]
    asked = [outcomes for task in tasks for _, outcomes in results[task]]

    def scores(arm: str) -> list[float]:
        return [outcomes[arm].score for outcomes in asked]

    def accuracy(arm: str) -> float:
        return fmean(fmean(o[arm].score for _, o in results[task]) for task in tasks)

    def work(arm: str) -> float:
        return fmean(outcomes[arm].work for outcomes in asked)

    names = [arm.name for arm in load.arms if arm is not FULL]
    top = max(names, key=accuracy)
    equals = [name for name in names if statistics.paired_p(scores(top), scores(name)) >= 0.05]
    best = min(equals, key=work)
    summary: dict[str, float | str] = {"full": round(accuracy(FULL.name), 4)}
    summary |= {name: round(accuracy(name), 4) for name in names if name in PUBLISHED}
    summary |= {
        "best": round(accuracy(best), 4),
        "best_policy": best,
        "best_work": round(work(best), 4),
        "hybrid_work": round(work("hybrid"), 4),
        "p_best_against_hybrid": round(statistics.paired_p(scores(best), scores("hybrid")), 4),
        "p_hybrid_against_sparsex": round(
            statistics.paired_p(scores("hybrid"), scores("sparsex")), 4
        ),
        "samples_per_task": min(len(results[task]) for task in tasks),
    }
    if set(FEW) <= set(names):
        summary |= {name: round(accuracy(name), 4) for name in FEW}
        summary["p_focus_against_prophet"] = round(statistics.paired_p(*map(scores, FEW)), 4)
    return summary


def write_html(file: Path, where: dict[str, object], result: harness.SuiteResult) -> None:
    """The run as one page: tables and plots."""
    from bench.quality import page

    with lab_engine() as lab:
        drawn = example("vt", Random(f"{SEED} vt 0"), PROMPT_TOKENS)
        computed = lab.computed_tokens(drawn, list(ARMS))
    page.write(file, where, result, drawn, computed)
