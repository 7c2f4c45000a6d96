# SPDX-License-Identifier: Apache-2.0
"""Approximate requests under every kind of pressure, and their plain twins (failure case 29).

    python -m tests.e2e.poisoning --requests 1000 --json poisoning.json
    python -m tests.e2e.poisoning --requests 1000 --similar     documents changed here and there

A pool so small that requests are preempted, steps so small that prompts are chunked and large
plans take several of them, several arrivals per step so that requests are admitted together, aborts
in between. After every few of them the same prompts follow without extra keys, one by one, while
approximate blocks of theirs are still in the pool: they must answer as a fresh engine without the
plugin did, to the last bit. Exit status 1 if one does not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import harness
from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, drain, submit
from tests.e2e.test_equality import assert_same

NUM_BLOCKS = 31  # one of them is vLLM's null block
SPREAD_TOKENS = 40
"""Plans that compute more than that many tokens at all layers take several steps."""
LIMITS = {"max_model_len": 640, "max_num_batched_tokens": 256, "max_num_seqs": 16}
NOISE = 2e-3  # of float32
_ROUND = 10
COUNTED = (
    *("reused", "similar", "entering", "accepted", "rejected", "preempted", "chunked"),
    *("together", "spread", "aborted", "twins", "prefix hits"),
)
BOUNDS = (0.2, None, 0.0, 0.4, 1e9)
"""`max_boundary_drift` in turns, of similar segments with a halo of `HALO_TOKENS`."""
HALO_TOKENS = 4
OPTIONS: list[dict[str, Any]] = [
    {"segreuse_policy": "shift"},
    {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.3},
    {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 0.3, "segreuse_dense_layers": 0},
    {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 0.2, "segreuse_dense_layers": 2},
    {"segreuse_policy": "epic", "segreuse_recompute_ratio": 0.2},
    {"segreuse_policy": "cacheblend", "segreuse_recompute_ratio": 0.2, "segreuse_dense_layers": 1},
    {"segreuse_policy": "prophet", "segreuse_recompute_ratio": 0.2},
]


def small_engine(segreuse: bool, similar: bool = False) -> Any:
    """An engine under pressure. float32: a wrong bit is not rounded away.

    Args:
        similar: similar segments are reused, too.
    """
    by_depth = {"shingle_tokens": 3, "threshold": 0.2, "w_exact": {1: 0, "all": 8}}
    similarity = by_depth if similar else None
    reuse = {"spread_tokens": SPREAD_TOKENS, "similarity": similarity}
    options: Any = reuse if segreuse else False
    return engine("qwen3", options, dtype="float32", num_gpu_blocks_override=NUM_BLOCKS, **LIMITS)


def make_prompts(vocab_size: int, requests: int, similar: bool = False) -> list[list[int]]:
    """Cut pieces and whole documents in any order, each prompt behind text of its own.

    Args:
        similar: every fortieth token is another one in each prompt.
    """
    text, dice = Prompts(vocab_size, seed=24), random.Random(24)
    documents = [text.tokens(n) for n in (96, 133, 200, 64, 310)]
    prompts = []
    for _ in range(requests):
        chosen = dice.sample(documents, dice.randrange(1, 3))
        prompt = text.around(*chosen, gaps=(dice.randrange(1, 40), 7, 12))
        prompt = prompt[: dice.randrange(60, 500)]
        if similar:
            for at in range(dice.randrange(40), len(prompt), 40):
                prompt[at] = text.tokens(1)[0]
        prompts.append(prompt)
    return prompts


def references(prompts: int, similar: bool = False) -> list[Answer]:
    """What a fresh engine without the plugin answers to each prompt, cold."""
    with small_engine(segreuse=False) as running:
        answers = []
        for prompt in make_prompts(running.vocab_size, prompts, similar):
            running.reset()
            answers += running.ask(prompt)
        return answers


def poison(
    running: Engine,
    expected: list[Answer],
    counts: Counter[str] | None = None,
    similar: bool = False,
) -> Counter[str]:
    """Run all prompts as approximate requests, and each once more as a plain one.

    Args:
        counts: what is returned; whoever passes it sees it in spite of an error, too.
        similar: see `make_prompts`.

    Returns:
        What happened: "reused" requests, those with "similar" tokens and with "entering" ones,
        segments that were "accepted" and "rejected" by the test, "preempted" requests, "chunked"
        steps, those "together" in a step, plans "spread" over several, "aborted" requests; plain
        "twins" that were compared to the last bit, and "prefix hits".

    Raises:
        AssertionError: a twin answers otherwise.
    """
    prompts = make_prompts(running.vocab_size, len(expected), similar)
    counts = Counter() if counts is None else counts
    dice = random.Random(25)
    schedule = running.scheduler.schedule
    running.scheduler.schedule = _counting(running.scheduler, counts)
    try:
        for first in range(0, len(prompts), _ROUND):
            numbers = range(first, min(first + _ROUND, len(prompts)))
            if similar:
                _test_similar(running, BOUNDS[first // _ROUND % len(BOUNDS)])
            ended = _approximate(running, {n: prompts[n] for n in numbers}, dice, counts)
            for number in reversed(ended):  # whose blocks are the youngest comes first
                _check_twin(number, running.ask(prompts[number])[0], expected[number], counts)
    finally:
        running.scheduler.schedule = schedule
    running.check_idle()
    return counts


def _test_similar(running: Engine, bound: float | None) -> None:
    """From here on; as with these options of the server."""
    halo_tokens = 0 if bound is None else HALO_TOKENS
    side = running.scheduler.connector.scheduler_side
    side.call("set_similarity", {"halo_tokens": halo_tokens, "max_boundary_drift": bound})


def _approximate(
    running: Engine, prompts: dict[int, list[int]], dice: random.Random, counts: Counter[str]
) -> list[int]:
    """Run prompts beside each other; the numbers of those that reused, by when they ended."""
    waiting, alive = list(prompts)[::-1], []

    def arrive() -> None:
        for _ in range(min(dice.choice([0, 0, 0, 6]), len(waiting))):
            number = waiting.pop()
            options = dice.choice(OPTIONS) | NAMESPACE | {"segreuse_min_reused_tokens": 16}
            length = {"max_tokens": dice.choice([1, 10, 30, 60]), "ignore_eos": True}
            alive.append(submit(running, str(number), prompts[number], options, **length))
        if alive and dice.random() < 0.01:
            abort(running, alive.pop(dice.randrange(len(alive))))
            counts["aborted"] += 1

    answers: dict[str, Answer] = {}
    while waiting:
        arrive()
        answers |= drain(running, arrive)
    reused = [int(name) for name, answer in answers.items() if answer.report["reused_tokens"]]
    counts["reused"] += len(reused)
    for kind in ("similar", "entering"):
        counts[kind] += sum(answer.report[f"{kind}_tokens"] > 0 for answer in answers.values())
    for outcome in ("accepted", "rejected"):
        segments = [answer.report[f"{outcome}_segments"] for answer in answers.values()]
        counts[outcome] += sum(segments)
    return reused


def _check_twin(number: int, answer: Answer, reference: Answer, counts: Counter[str]) -> None:
    """A prompt that was computed exactly before is a prefix hit: right, but it rounds otherwise.

    That happens to requests that run without reuse after they were preempted.
    """
    if answer.cached_tokens == reference.cached_tokens:
        counts["twins"] += 1
        assert answer.token_ids == reference.token_ids, f"prompt {number}"
        assert answer.logprobs == reference.logprobs, f"prompt {number}"
    else:
        counts["prefix hits"] += 1
        assert_same(answer, reference, NOISE)


def _counting(scheduler: Any, counts: Counter[str]) -> Callable[[], Any]:
    """The scheduler's `schedule`, counting what it does."""
    schedule = scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        counts["preempted"] += len(step.preempted_req_ids or ())
        plans = step.kv_connector_metadata.plans
        counts["together"] += len(plans) if len(plans) > 1 else 0
        counts["spread"] += sum(plan.spread for plan in plans)
        for name in step.num_scheduled_tokens:
            request = scheduler.requests[name]
            counts["chunked"] += request.num_computed_tokens < request.num_tokens
        return step

    return counting


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.poisoning")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--similar", action="store_true", help="similar segments, too")
    options = parser.parse_args(arguments)
    where, began = harness.environment(), time.monotonic()
    expected = references(options.requests, options.similar)
    failure = ""
    counts: Counter[str] = Counter()
    with small_engine(segreuse=True, similar=options.similar) as running:
        try:
            poison(running, expected, counts, options.similar)
        except AssertionError as error:
            failure = str(error)
    where["seconds"] = round(time.monotonic() - began, 1)
    print(f"python -m tests.e2e.poisoning --requests {options.requests}\n{dict(counts)}")
    if failure:
        print(f"FAILED: {failure}")
    if options.json:
        found = result(options.requests, counts, failure)
        harness.write_json(options.json, "poisoning", where, found)
    return int(bool(failure))


def result(requests: int, counts: Counter[str], failure: str) -> harness.SuiteResult:
    """What happened, as a benchmark's result: no row, all figures in the summary."""
    figures = {name.replace(" ", "_"): counts[name] for name in COUNTED}
    summary = {"requests": requests, **figures, "failed": int(bool(failure)), "failure": failure}
    return {"rows": [], "summary": summary}


if __name__ == "__main__":
    sys.exit(main())
