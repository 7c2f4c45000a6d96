# SPDX-License-Identifier: Apache-2.0
"""The exact tier beside vLLM itself: the same prompts in every state that the cache may be in.

    python -m tests.e2e.exact_arms --prompts 1000 --json exact-tier.json

Each prompt is computed cold, and its other answers are compared with that one. Requests without
extra keys say how far vLLM's own answers depend on what was cached (`OWN`); the exact tier may add
nothing to that (`EXACT`). Holes are made by evicting blocks of the prompt. What is "tiered" has
gone through host memory, behind holes, too. `CONTROL` reuses KV that was computed behind another
first token, as a tier would that compared tokens and not the chain.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import harness
from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, apart, engine
from tests.e2e.stepping import finished_in_step, preempt, submit

MODULE = "tests.e2e.exact_arms"
OPTIONS = NAMESPACE | {"segreuse_policy": "exact", "segreuse_min_reused_tokens": BLOCK_SIZE}
OWN = ("vLLM warm", "vLLM hole", "vLLM preempted")
EXACT = ("cold", "warm", "hole", "preempted", "tiered")
HOST_GIB = 0.25
"""Host memory for all blocks of the cache."""
CONTROL = "control"
WHOLE: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 512, "max_num_seqs": 8}
CHUNKED = WHOLE | {"max_num_batched_tokens": 80}
"""Steps and chunks that end within blocks; most prompts and many holes take several."""
TWO_RANKS = {"tensor_parallel_size": 2}
TOGETHER = 8
CORES = sorted(os.sched_getaffinity(0))
SLACK = 2.0
"""Where vLLM's answers depend on the cache: the largest of two samples of one noise differ."""

ENGINES: dict[str, dict[str, Any]] = {
    "TP=1": WHOLE,
    "TP=1 chunked": CHUNKED,
    "TP=2": WHOLE | TWO_RANKS,
    "TP=2 chunked": CHUNKED | TWO_RANKS,
    "TP=1 bf16": WHOLE | {"dtype": "bfloat16"},
    "TP=1 compiled": WHOLE | {"enforce_eager": False},
}


@dataclass
class Found:
    """What one engine answered.

    Attributes:
        differences: by arm, of each prompt: the largest difference of a log-probability from the
            cold answer; infinity if another token was answered in spite of equal numbers.
        exact_tokens: by arm, tokens that the reports say were reused in place.
        planned: by arm, how many requests were.
    """

    differences: dict[str, list[float]] = field(default_factory=dict)
    exact_tokens: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)

    def note(self, arm: str, answers: list[Answer], cold: list[Answer]) -> None:
        tokens = [answer.report.get("exact_tokens", 0) for answer in answers]
        self.differences.setdefault(arm, []).extend(map(difference, answers, cold))
        self.exact_tokens[arm] = self.exact_tokens.get(arm, 0) + sum(tokens)
        self.planned[arm] = self.planned.get(arm, 0) + sum(t > 0 for t in tokens)

    def largest(self, *arms: str) -> float:
        return max(d for arm in arms for d in self.differences[arm])

    def check(self, arm: str) -> None:
        """AssertionError unless the arm is as close to the cold answers as vLLM's own arms are."""
        own, ours = self.largest(*OWN), self.largest(arm)
        allowed = SLACK * own  # nothing where vLLM's are the same to the last bit
        assert ours <= allowed, f"{arm}: off by {ours:.3g}, vLLM's own arms by {own:.3g} at most"


@dataclass(frozen=True)
class Prompt:
    """Tokens, the blocks that are evicted, and the hash of every full block."""

    tokens: list[int]
    holes: list[int]
    hashes: list[Any]


def difference(answer: Answer, cold: Answer) -> float:
    """`apart`; infinite where answers differ and log-probabilities do not."""
    return apart(answer, cold) or (0.0 if answer.token_ids == cold.token_ids else math.inf)


class Arms:
    """Asks one engine for each prompt in every arm, some prompts together."""

    def __init__(self, running: Engine, seed: int) -> None:
        self._running = running
        self._text = Prompts(running.vocab_size, seed)
        self._dice = random.Random(seed)

    def run(self, prompts: int, controls: int, minutes: float) -> Found:
        """`prompts` prompts in all arms, fewer if the time is over, and at least `controls` of them
        in the control."""
        found, until = Found(), time.monotonic() + 60 * minutes
        for first in range(0, prompts, TOGETHER):
            if time.monotonic() > until:
                break
            group = [self._make_prompt() for _ in range(min(TOGETHER, prompts - first))]
            self._ask_all(found, group, with_control=first < controls)
        return found

    def _make_prompt(self) -> Prompt:
        tokens = self._text.tokens(self._dice.randrange(6 * BLOCK_SIZE, 13 * BLOCK_SIZE))
        count = (len(tokens) - 1) // BLOCK_SIZE
        holes = self._dice.sample(range(count), self._dice.randrange(1, count // 2))
        if max(set(range(count)) - set(holes)) < min(holes):
            holes = [0]  # else nothing would be resident behind the first hole
        return Prompt(tokens, holes, self._hashes(tokens))

    def _hashes(self, tokens: list[int]) -> list[Any]:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        core = self._running.llm.llm_engine.engine_core.engine_core
        hasher = core.request_block_hasher
        return list(Request("", tokens, SamplingParams(), None, block_hasher=hasher).block_hashes)

    def _ask_all(self, found: Found, group: list[Prompt], with_control: bool) -> None:
        cold = self._ask(group, None)
        for whose, options in (("vLLM ", None), ("", OPTIONS)):
            found.note(f"{whose}warm", self._ask(group, options), cold)
            self._make_holes(group)
            found.note(f"{whose}hole", self._ask(group, options), cold)
            self._make_holes(group)
            found.note(f"{whose}preempted", self._preempted(group, options), cold)
        self._make_holes(group)
        self._evict_to_tier()
        found.note("tiered", self._ask(group, OPTIONS), cold)
        self._running.reset()  # host memory, too
        found.note("cold", self._ask(group, OPTIONS), cold)
        if with_control:
            self._forget(group)
            found.note(CONTROL, self._misled(group), cold)

    def _ask(self, group: list[Prompt], options: dict[str, Any] | None) -> list[Answer]:
        return self._running.ask(*(prompt.tokens for prompt in group), options=options)

    def _preempted(self, group: list[Prompt], options: dict[str, Any] | None) -> list[Answer]:
        """The answers; each request is preempted behind its second token, and then misses a block
        more."""
        names = [str(i) for i in range(len(group))]
        for name, prompt in zip(names, group, strict=True):
            submit(self._running, name, prompt.tokens, options)
        scheduler, ended = self._running.scheduler, {}
        while len(ended) < len(group):
            ended |= finished_in_step(self._running)
            for request in list(scheduler.running):
                if request.num_output_tokens == 2 and not request.num_preemptions:
                    # As vLLM does when it resets its cache under running requests.
                    preempt(self._running, request)
                    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
                    self._evict(request.block_hashes[1])
        return [ended[name] for name in names]

    def _misled(self, group: list[Prompt]) -> list[Answer]:
        """The exact tier is given the blocks of twins that begin with another token."""
        from vllm_segreuse.compat.block_pool import SegmentBlockPool

        twins = [[prompt.tokens[0] ^ 1, *prompt.tokens[1:]] for prompt in group]
        self._running.ask(*twins)
        hashes = {tuple(twin[1:]): self._hashes(twin) for twin in twins}
        resident_blocks = SegmentBlockPool.resident_blocks

        def misled(pool: Any, request: Any, first: int, last: int) -> Any:
            twin = SimpleNamespace(block_hashes=hashes[tuple(request.prompt_token_ids[1:])])
            found = resident_blocks(pool, twin, first, last)  # type: ignore[arg-type]
            found[: max(0, 1 - first)] = -1  # the block in which they differ
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SegmentBlockPool, "resident_blocks", misled)
            return self._ask(group, OPTIONS)

    def _make_holes(self, group: list[Prompt]) -> None:
        for prompt in group:
            for hole in prompt.holes:
                self._evict(prompt.hashes[hole])

    def _evict_to_tier(self) -> None:
        """All that is cached is taken for something else, and kept in host memory."""
        pool = self._running.pool
        pool.free_blocks(reversed(pool.get_new_blocks(pool.get_num_free_blocks())))
        self._running.ask(self._text.tokens(2))  # the step that copies it

    def _forget(self, group: list[Prompt]) -> None:
        for prompt in group:
            for block_hash in prompt.hashes:
                self._evict(block_hash)

    def _evict(self, block_hash: Any) -> None:
        """A block is cached no more, however often it was."""
        pool = self._running.pool
        while found := pool.get_cached_block(block_hash, [0]):
            pool.evict_blocks({found[0].block_id})


@contextmanager
def small_engine(**arguments: Any) -> Iterator[Engine]:
    """An engine whose cache is small, so that looking through it is quick."""
    options = {"tier": {"host_gib": HOST_GIB}}
    sizes = {"dtype": "float32", "num_gpu_blocks_override": 641}
    with engine("qwen3", segreuse=options, **sizes | arguments) as it:
        yield it
        it.check_idle()


def ask_engine(
    name: str, prompts: int, controls: int, seed: int, minutes: float = math.inf
) -> Found:
    """One of `ENGINES` in this process."""
    with small_engine(**ENGINES[name]) as running:
        return Arms(running, seed).run(prompts, controls, minutes)


def ask_in_process_of_its_own(
    name: str, prompts: int, controls: int, seed: int, minutes: float = math.inf
) -> Found:
    """The same in another process: one engine's ranks are pinned to one core each."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        ranks = ENGINES[name].get("tensor_parallel_size", 1)
        environment = dict(os.environ)
        if ranks > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, CORES[:ranks]))
        numbers = [str(n) for n in (prompts, controls, seed, minutes)]
        done = subprocess.run(
            [sys.executable, "-m", MODULE, "--one", name, *numbers, str(path)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert path.exists(), done.stdout[-6000:]
        return Found(**json.loads(path.read_text()))


def describe(name: str, found: Found, say: Callable[[str], None]) -> list[harness.Row]:
    """Print one engine's figures; a row for each arm, with what was found there."""
    rows: list[harness.Row] = []
    say(f"{name}: {len(found.differences['cold'])} prompts")
    for arm in found.differences:
        row = describe_arm(name, arm, found)
        say(
            f"  {arm:14} largest {row['largest']:.3g}, "
            f"identical {row['identical']} of {row['answers']}, "
            f"reused in place {row['reused']} ({row['exact_tokens']} tokens) {row['finding']}"
        )
        rows.append(row)
    return rows


def describe_arm(name: str, arm: str, found: Found) -> harness.Row:
    """One arm's figures; `finding` is empty where all is as it must be."""
    differences, finding = found.differences[arm], ""
    if arm not in OWN:
        try:
            found.check(arm)
            # The control must be beyond, or the comparison could not fail.
            finding = "" if arm in EXACT else "as close as the exact arms: nothing is compared"
        except AssertionError as error:
            finding = str(error) if arm in EXACT else ""
    if arm in ("hole", "preempted", "tiered") and found.planned[arm] < len(differences):
        finding = finding or f"only {found.planned[arm]} were reused in place"
    return {
        "engine": name,
        "arm": arm,
        "answers": len(differences),
        "identical": sum(difference == 0 for difference in differences),
        "largest": max(differences),
        "reused": found.planned[arm],
        "exact_tokens": found.exact_tokens[arm],
        "finding": finding,
    }


def result(rows: list[harness.Row]) -> harness.SuiteResult:
    """Figures of all engines; answers are those of the exact arms."""
    exact = [row for row in rows if row["arm"] in EXACT]
    # JSON has no infinity: where another token was answered there is no difference to tell.
    told = [
        row | {"largest": row["largest"] if row["largest"] < math.inf else None} for row in rows
    ]
    return {
        "rows": told,
        "summary": {
            "engines": len({row["engine"] for row in rows}),
            "prompts": sum(row["answers"] for row in rows if row["arm"] == "cold"),
            "answers": sum(row["answers"] for row in exact),
            "identical": sum(row["identical"] for row in exact),
            "reused": sum(row["reused"] for row in exact),
            "controls": sum(row["answers"] for row in rows if row["arm"] == CONTROL),
            "findings": sum(bool(row["finding"]) for row in rows),
        },
    }


def main() -> int:
    """Command line; exit status 1 at a finding."""
    if sys.argv[1:2] == ["--one"]:
        name, *numbers, minutes, path = sys.argv[2:]
        found = ask_engine(name, *map(int, numbers), minutes=float(minutes))
        Path(path).write_text(json.dumps(asdict(found)))
        return 0
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--prompts", type=int, default=1000, help="per engine (%(default)s)")
    parser.add_argument("--controls", type=int, default=50, help="of them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="per engine, at most")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    options = parser.parse_args()
    where = harness.environment()
    print(f"python -m {MODULE} {' '.join(sys.argv[1:])}", flush=True)
    began, rows = time.monotonic(), []
    for name in options.engines:
        found = ask_in_process_of_its_own(
            name, options.prompts, options.controls, options.seed, options.minutes
        )
        rows += describe(name, found, partial(print, flush=True))
    found_all, where["seconds"] = result(rows), round(time.monotonic() - began, 1)
    print(f"findings: {found_all['summary']['findings']}; {where['seconds']:.0f} s")
    if options.json:
        harness.write_json(options.json, "exact-tier", where, found_all)
    return int(any(row["finding"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
