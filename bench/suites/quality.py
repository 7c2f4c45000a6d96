# SPDX-License-Identifier: Apache-2.0
"""What each policy loses against full prefill, and what it computes, on the bundled model.

Every example is asked in full and under every policy, on documents that were computed in other
prompts: differences are paired. `best` is, of the policy with the highest mean over the four RULER
tasks and those equivalent to it (`bench.quality.statistics.MARGIN`), the one of least work.

A full run has one engine per core. An interrupt (Ctrl-C) ends it early, with what was asked so far.
`BENCH_QUALITY_TASKS=vt,cwe` names the tasks to ask, `BENCH_QUALITY_MODEL=DIR` another model, and
`BENCH_QUALITY_SEEDS=tuning` the examples on which policies are chosen, in the place of those on
which they are reported (`bench.quality.seeds`).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import harness
from bench.quality import seeds
from bench.quality.engine import FULL, MODEL, Arm, lab_engine
from bench.quality.figures import Results, figures
from bench.quality.tasks import RULER, TASKS, example
from bench.quality.workers import Alone, Workers, alone

PROMPT_TOKENS = 2048
ARMS = (
    FULL,
    Arm("shift", {"policy": "shift"}),
    Arm("epic", {"policy": "epic", "recompute_ratio": 0.15}),
    Arm("cacheblend", {"policy": "cacheblend", "recompute_ratio": 0.15}),
    Arm("sparsex", {"policy": "sparsex", "dense_layers": 0, "recompute_ratio": 0.15}),
    Arm("hybrid", {"policy": "sparsex", "dense_layers": 5, "recompute_ratio": 0.15}),
    Arm("prophet", {"policy": "prophet", "recompute_ratio": 0.1}),
    Arm("prophet 0.5 %", {"policy": "prophet", "recompute_ratio": 0.005}),
    Arm("focus", {"policy": "focus", "recompute_ratio": 0.1}),
    Arm("focus 0.5 %", {"policy": "focus", "recompute_ratio": 0.005}),
)
PUBLISHED = ("shift", "epic", "cacheblend", "sparsex", "hybrid", "prophet")
COLUMNS = (
    *("task", "policy", "samples", "accuracy", "low", "high", "difference"),
    *("p_holm", "verdict", "first_token_kl", "work", "ttft_ms"),
)
"""Of a row, what is printed; its file has more."""


@dataclass(frozen=True)
class Load:
    """What is asked: tasks, examples of each, arms, and of which set of seeds."""

    tasks: tuple[str, ...]
    samples: int
    arms: tuple[Arm, ...]
    seeds: str = "reporting"


UNKNOWN_TO = {"models/lab": ("mq-vt",)}
"""Tasks that a model has not learnt, and which it is not asked unless they are named."""
FULL_LOAD = Load(tuple(TASKS), 200, ARMS)
QUICK_LOAD = Load(
    ("vt",), 20, tuple(arm for arm in ARMS if arm.name in (*PUBLISHED, "full", "focus"))
)


def run(quick: bool) -> harness.SuiteResult:
    """Ask all examples (`quick`: 20 of one task)."""
    model = _model_name()
    load = replace(QUICK_LOAD if quick else FULL_LOAD, seeds=seeds.chosen())
    load = replace(load, tasks=tuple(t for t in load.tasks if t not in UNKNOWN_TO.get(model, ())))
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
    rows, summary = figures(results, load.arms)
    return {
        "rows": rows,
        "summary": {"model": model, "seeds": load.seeds, **summary},
        "interrupted": any(len(results.get(t, ())) < load.samples for t in load.tasks),
    }


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
    answers = engines.ask((draw(load.seeds, task, number) for task, number in steps), load.arms)
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


def draw(which: str, task: str, number: int) -> dict[str, Any]:
    """Arguments of `tasks.example` for one example of a set of seeds."""
    return {
        "task": task,
        "rng": seeds.rng(which, task, number),
        "tokens": PROMPT_TOKENS,
        "question_first": number % 4 == 3,
        "interleaved": (0.0, 0.0, 0.5, 1.0)[number % 4],
    }


def shown(result: harness.SuiteResult) -> harness.SuiteResult:
    """What of a result fits a terminal's width."""
    rows = [{key: row[key] for key in COLUMNS if key in row} for row in result["rows"]]
    return {"rows": rows, "summary": result["summary"]}


def _model_name() -> str:
    model = MODEL.resolve()
    inside = model.is_relative_to(harness.REPOSITORY)
    return str(model.relative_to(harness.REPOSITORY)) if inside else model.name


def write_html(file: Path, where: dict[str, object], result: harness.SuiteResult) -> None:
    """The run as one page: tables and plots."""
    from bench.quality import page

    with lab_engine() as lab:
        drawn = example(**draw(str(result["summary"]["seeds"]), "vt", 0))
        computed = lab.computed_tokens(drawn, list(ARMS))
    page.write(file, where, result, drawn, computed)
