# SPDX-License-Identifier: Apache-2.0
"""Parts `ttft-SHAPE` of the suite `gpu`: the time to the first token, one request at a time.

Beside full prefill and every policy stands `cached`: a prompt that vLLM's own prefix cache holds in
full. Nothing can be faster than that, and it is a good part of what a reused prompt takes.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from bench import engine, harness
from bench.gpu import models
from bench.gpu.common import (
    NAMESPACE,
    TRACES,
    Found,
    Policy,
    Prompts,
    running,
    watched_passes,
    write_trace,
)

HEADLINE = ("qwen3-8b", 16384, 0.98)
FAR = 65536
_WARM_UP = 2

POLICIES = (
    Policy("full"),
    Policy("shift", "shift"),
    Policy("sparsex", "sparsex", 0.1),
    Policy("hybrid", "sparsex", 0.1, dense_share=0.15),
    Policy("one_dense", "sparsex", 0.05, dense_layers=1),
    Policy("prophet", "prophet"),
    Policy("focus", "focus", 0.03),
)


class Load(NamedTuple):
    """What a shape is measured at."""

    contexts: tuple[int, ...]
    shares: tuple[float, ...]
    rounds: int


LOADS = {
    "qwen3-8b": Load((4096, 16384, 32768, 65536), (0.9, 0.98), 3),
    "llama-3.1-8b": Load((16384, 65536), (0.9, 0.98), 3),
    "qwen3-30b-a3b": Load((16384, 65536), (0.9, 0.98), 3),
    "tiny": Load((512, 1024), (0.5, 0.9), 1),
}


def run(shape: str, eager: bool) -> Found:
    """Full prefill against every policy, at the shape's contexts and shares of reused tokens."""
    load = LOADS[shape]
    with running(shape, max(load.contexts) + 64, eager) as llm:
        rows = measured(llm, shape, load)
        write_traces(llm, shape, max(load.contexts), max(load.shares))
    return rows, summary(rows)


def measured(llm: Any, shape: str, load: Load) -> list[harness.Row]:
    """The rows of the same, in an engine that runs the shape."""
    rows: list[harness.Row] = []
    layers = models.num_layers(shape)
    cells = list(itertools.product(load.contexts, load.shares))
    for tokens, share in harness.progress(cells, f"ttft {shape}"):
        # Nothing in common with those of other cells.
        prompts = Prompts(tokens, share, seed=tokens + round(100 * share))
        here = list(cell(llm, shape, layers, prompts, tokens, share, load.rounds))
        rows += here
        print(json.dumps(here), file=sys.stderr, flush=True)
    return rows


def cell(
    llm: Any, shape: str, layers: int, prompts: Prompts, tokens: int, share: float, rounds: int
) -> Iterator[harness.Row]:
    """One context and share: every policy, in turns."""
    cached = Policy("cached")
    taken: dict[str, list[engine.Timed]] = {policy.label: [] for policy in (*POLICIES, cached)}
    passes: dict[str, list[float]] = {label: [] for label in taken}
    spent = list[float]()

    def timed_pass(take: Callable[[list[Any]], Any], plans: list[Any]) -> Any:
        started = time.perf_counter()
        report = take(plans)
        spent.append(1e3 * (time.perf_counter() - started))
        return report

    def ask(policy: Policy, prompt: list[int]) -> engine.Timed:
        spent.clear()
        timed = engine.first_token(llm, prompt, policy.extra_args(layers))
        if turn >= _WARM_UP:
            taken[policy.label].append(timed)
            passes[policy.label].append(sum(spent))
        return timed

    with watched_passes(timed_pass):
        for turn in range(rounds + _WARM_UP):
            for document in prompts.documents:  # a long round may have driven them out
                engine.first_token(llm, document, {"extra_keys": NAMESPACE})
            for policy in harness.rotated(POLICIES, turn):
                prompt = prompts.next()
                timed = ask(policy, prompt)
                if policy.name is not None:
                    engine.require_reuse(timed, policy.name, prompts.donated_tokens)
                else:  # while it is there
                    ask(cached, prompt)
    full = statistics.median(timed.ms for timed in taken["full"])
    for policy in (*POLICIES, cached):
        times = [timed.ms for timed in taken[policy.label]]
        last = taken[policy.label][-1]
        report = last.report or {}
        computed = float(report.get("computed_share", 1.0 - last.cached_tokens / tokens))
        speedup = full / statistics.median(times)
        yield {
            "shape": shape,
            "tokens": tokens,
            "share": share,
            "policy": policy.label,
            "reused": report.get("reused_tokens", 0),
            "computed_share": computed,
            "median_ms": statistics.median(times),
            "min_ms": min(times),
            "max_ms": max(times),
            "pass_ms": statistics.median(passes[policy.label]),
            "speedup": speedup,
            "efficiency": speedup * computed,
            "rounds": len(times),
        }


def write_traces(llm: Any, shape: str, tokens: int, share: float) -> None:
    """Of requests of each policy, and of one that vLLM's prefix cache holds, if there is a folder
    for them."""
    if not os.environ.get(TRACES):
        return
    layers = models.num_layers(shape)
    prompts = Prompts(tokens, share, seed=1 + tokens)
    for document in prompts.documents:
        engine.first_token(llm, document, {"extra_keys": NAMESPACE})
    for policy in POLICIES:
        extra_args = policy.extra_args(layers)
        engine.first_token(llm, prompts.next(), extra_args)
        ask = partial(_next_first_token, llm, prompts, extra_args)
        write_trace(f"{shape}-{policy.label}", ask)
    held = prompts.next()
    engine.first_token(llm, held)
    write_trace(f"{shape}-cached", partial(engine.first_token, llm, held))


def _next_first_token(llm: Any, prompts: Prompts, extra_args: dict[str, Any] | None) -> object:
    return engine.first_token(llm, prompts.next(), extra_args)


def summary(rows: list[harness.Row]) -> dict[str, float | str]:
    """What must be shown, and the fewest reused tokens from which on each policy paid."""
    shape = rows[0]["shape"]
    figures: dict[str, float | str] = {}
    for tokens, suffix in ((HEADLINE[1], ""), (FAR, "_far")):
        where = (HEADLINE[0], tokens, HEADLINE[2])
        here = [row for row in rows if (row["shape"], row["tokens"], row["share"]) == where]
        if here:
            figures |= {name + suffix: value for name, value in _speedups(here).items()}
    for policy in {row["policy"] for row in rows} - {"full", "cached"}:
        figures[f"break_even_tokens_{shape}_{policy}"] = break_even(
            [row for row in rows if row["policy"] == policy]
        )
    return figures


def _speedups(here: list[harness.Row]) -> dict[str, float]:
    """Of one context and share."""
    by_policy = {row["policy"]: row for row in here}
    cheap = [
        row["speedup"]
        for row in here
        if row["computed_share"] <= 0.07 and row["policy"] not in ("full", "shift", "cached")
    ]
    return {
        "cached_speedup": by_policy["cached"]["speedup"],
        "shift_speedup": by_policy["shift"]["speedup"],
        "hybrid_efficiency": by_policy["hybrid"]["efficiency"],
        "one_dense_speedup": by_policy["one_dense"]["speedup"],
        "best_speedup_at_7_percent": max(cheap, default=0.0),
    }


def break_even(rows: list[harness.Row]) -> float:
    """The fewest reused tokens from which on every measurement was faster than full prefill.

    The bypass rule is this figure as `min_reused_tokens`. Infinity if the last one did not pay.
    """
    least = float("inf")
    for row in sorted(rows, key=lambda row: -row["reused"]):
        if row["speedup"] <= 1.0:
            break
        least = float(row["reused"])
    return least
