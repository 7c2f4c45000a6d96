# SPDX-License-Identifier: Apache-2.0
"""A long mixed load on a pool that is too small: leaks, hangs, failures, memory, latency.

One engine in this process, always as many requests as it may run and a few that wait. Their prompts
hold known documents in any order, some carry no extra keys, and the pool holds a few of them only:
requests are preempted all the time. One in ten is aborted at some point, and one in ten computes a
document that is frozen then while another is let go (`documents`). Now and then the prefix cache is
reset, running requests included. It ends after a number of requests, or of steps.

`p99_ratio` compares the time to the first token in the last quarter with that in the first;
`p99_cpu_ratio` is the same in CPU time of the process, which other programs cannot disturb.
`contained_errors` are those of ours that vLLM did not see: each cost a request its reuse.
"""

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import engine, harness, shapes
from bench.suites.documents import EXTRA_KEY, Documents
from vllm_segreuse.features.knowledge.engine import ingesting, was_frozen

SHAPE = "qwen3"
NUM_BLOCKS = 65  # of 32 tokens; one is vLLM's null block
RUNNING, WAITING = 8, 4
ABORTED = 0.1
PLAIN = 0.1
INGESTED = 0.1
PARTS = 4
SPREAD_TOKENS = 96  # a few requests are set aside at any time
DOCUMENT_TOKENS = (96, 133, 200, 64, 310, 180)
OUTPUT_TOKENS = (1, 8, 40, 120)
NAMESPACES = (EXTRA_KEY, "b")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"segreuse_policy": "shift"},
    {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.3},
    {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 0.3, "segreuse_dense_layers": 0},
    {"segreuse_policy": "sparsex", "segreuse_recompute_ratio": 0.2, "segreuse_dense_layers": 2},
)
KINDS = ("ended", "reused", "set_aside", "preempted", "aborted", "frozen", "let_go", "resets")
_STEPS_PER_REQUEST = 500  # far more than any takes: who is not done by then hangs


class Load(NamedTuple):
    """How long it goes on."""

    requests: int
    warm_up: int
    reset_every: int


FULL = Load(requests=6000, warm_up=400, reset_every=200)
QUICK = Load(requests=400, warm_up=40, reset_every=100)


@dataclass
class Asked:
    """A request under way."""

    number: int
    output_tokens: int
    keyed: bool
    freezes: bool
    abort_at: int | None
    wall_s: float
    cpu_s: float
    step: int
    answered: bool = False


@dataclass
class Part:
    """What one quarter of the load took."""

    counts: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    ttft_cpu_s: list[float] = field(default_factory=list)
    resident_mb: float = 0.0


def run(quick: bool) -> harness.SuiteResult:
    """Soak one engine (`quick`: a few hundred requests)."""
    load = QUICK if quick else FULL
    # On one core: of two threads that wait for each other, whatever else runs slows down both.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(max(os.sched_getaffinity(0)))
    engine.prepare_environment(1)
    with engine.engine(
        shapes.make_model(SHAPE),
        segreuse={"spread_tokens": SPREAD_TOKENS},
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=1024,
        max_num_batched_tokens=512,
        max_num_seqs=RUNNING,
        enforce_eager=True,
    ) as llm:
        soak = Soak(llm.llm_engine, load)
        soak.run()
        return soak.result()


class Soak:
    """Drives one engine step by step.

    Args:
        vllm_engine: vLLM's `LLMEngine`, its core in this process.
        load: how long.
    """

    def __init__(self, vllm_engine: Any, load: Load) -> None:
        self._engine = vllm_engine
        core = vllm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._load = load
        self._dice = random.Random(0)
        self._documents = [self._tokens(count) for count in DOCUMENT_TOKENS]
        self._frozen = Documents(core, self._tokens, lambda: self._dice.randrange(64, 130))
        self._under_way: dict[str, Asked] = {}
        self._submitted = 0
        self._steps = 0
        self._hung = self._leaked = self._errors = 0
        self._parts = [Part() for _ in range(PARTS)]
        self._memory: list[tuple[int, float]] = []
        self._count_steps()

    def run(self) -> None:
        """The load, then the end of every request; whoever does not end hangs."""
        errors = _Errors()
        logging.getLogger("vllm.segreuse").addHandler(errors)
        try:
            for _ in harness.progress(self._until_idle(), "soak"):
                self._step()
        finally:
            logging.getLogger("vllm.segreuse").removeHandler(errors)
        self._errors = errors.count
        self._hung += len(self._under_way)
        for name in list(self._under_way):
            self._abort(name)
        self._parts[-1].counts["given_back"] = self._frozen.state()["given_back"]
        self._frozen.end()
        pool = self._scheduler.kv_cache_manager.block_pool
        self._leaked = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        # Imported here: it loads numba, which must not be there before the engine.
        from bench.integrity import check_integrity

        check_integrity(self._scheduler.connector.scheduler_side.parts.core.index)

    def result(self) -> harness.SuiteResult:
        """Rows by quarter, and the figures that matter.

        Raises:
            BenchError: the load was not what it claims to be.
        """
        total: Counter[str] = sum((part.counts for part in self._parts), Counter())
        for what in (*KINDS, "returned", "given_back"):
            if not total[what]:
                raise harness.BenchError(f"{what}: 0, so that the soak does not show what it is to")
        rows = [
            {
                "part": number,
                **{what: p.counts[what] for what in KINDS},
                "rss_mb": p.resident_mb,
                "ttft_p50_ms": 1e3 * float(np.percentile(p.ttft_s, 50)),
                "ttft_p99_ms": 1e3 * float(np.percentile(p.ttft_s, 99)),
                "ttft_p99_cpu_ms": 1e3 * float(np.percentile(p.ttft_cpu_s, 99)),
            }
            for number, p in enumerate(self._parts, 1)
        ]
        first, last = rows[0], rows[-1]
        summary = {
            "leaked_blocks": self._leaked,
            "hung_requests": self._hung,
            "failed_requests": total["failed"],
            "contained_errors": self._errors,
            "p99_ratio": last["ttft_p99_ms"] / first["ttft_p99_ms"],
            "p99_cpu_ratio": last["ttft_p99_cpu_ms"] / first["ttft_p99_cpu_ms"],
            "rss_slope_mb_per_1k_requests": slope_per_1k(self._memory),
            "requests": self._submitted,
            "preemptions": total["preempted"],
            "frozen_documents": total["frozen"],
            "given_back_documents": total["given_back"],
            "returned_documents": total["returned"],
        }
        return {"rows": rows, "summary": summary}

    # One step.

    def _until_idle(self) -> Iterator[int]:
        """Step after step, until nothing is left to do or too many were taken."""
        limit = self._load.requests * 20 + _STEPS_PER_REQUEST
        while self._steps < limit and (self._under_way or self._submitted < self._load.requests):
            yield self._steps
            self._steps += 1

    def _step(self) -> None:
        while len(self._under_way) < RUNNING + WAITING and self._submitted < self._load.requests:
            self._submit()
        for output in self._engine.step():
            self._receive(output)
        for name, asked in list(self._under_way.items()):
            if asked.abort_at is not None and self._steps - asked.step >= asked.abort_at:
                self._part(asked.number).counts["aborted"] += 1
                self._abort(name)
            elif self._steps - asked.step > _STEPS_PER_REQUEST:
                self._hung += 1
                self._abort(name)

    def _submit(self) -> None:
        dice, number, name = self._dice, self._submitted, str(self._submitted)
        self._submitted += 1
        freezes, keyed = dice.random() < INGESTED, dice.random() >= PLAIN
        with ExitStack() as context:
            if freezes:
                tokens, order, let_go, returns = self._frozen.next()
                self._part(number).counts.update(let_go=let_go, returned=returns)
                params = context.enter_context(ingesting(EXTRA_KEY, order))
            else:
                tokens, params = self._prompt(), self._sampling(keyed)
            self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        self._under_way[name] = Asked(
            number,
            params.max_tokens,
            keyed or freezes,
            freezes,
            dice.randrange(40) if dice.random() < ABORTED else None,
            time.perf_counter(),
            time.process_time(),
            self._steps,
        )
        if number % self._load.reset_every == self._load.reset_every - 1:
            self._part(number).counts["resets"] += self._engine.reset_prefix_cache(True)
        if number >= self._load.warm_up and number % 10 == 0:
            self._part(number).resident_mb = resident_mb()
            self._memory.append((number, self._part(number).resident_mb))

    def _sampling(self, keyed: bool) -> Any:
        from vllm import SamplingParams

        options = self._dice.choice(OPTIONS) | {
            "extra_keys": self._dice.choice(NAMESPACES),
            "segreuse_min_reused_tokens": 16,
        }
        return SamplingParams(
            max_tokens=self._dice.choice(OUTPUT_TOKENS),
            temperature=0.0,
            ignore_eos=True,
            extra_args=options if keyed else None,
        )

    def _receive(self, output: Any) -> None:
        asked = self._under_way.get(output.request_id)
        if asked is None:
            return
        part, tokens = self._part(asked.number), len(output.outputs[0].token_ids)
        if tokens and not asked.answered:
            asked.answered = True
            if asked.number >= self._load.warm_up:
                part.ttft_s.append(time.perf_counter() - asked.wall_s)
                part.ttft_cpu_s.append(time.process_time() - asked.cpu_s)
        if output.finished:
            del self._under_way[output.request_id]
            report = (output.kv_transfer_params or {}).get("segreuse")
            part.counts["ended"] += 1
            part.counts["frozen"] += was_frozen(output)
            part.counts["reused"] += bool(report and report["reused_tokens"])
            part.counts["failed"] += tokens != asked.output_tokens or asked.keyed != bool(report)

    def _abort(self, name: str) -> None:
        self._engine.abort_request([name])
        del self._under_way[name]

    def _part(self, number: int) -> Part:
        return self._parts[number * PARTS // self._load.requests]

    def _count_steps(self) -> None:
        schedule = self._scheduler.schedule

        def counting(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            now = self._part(self._submitted - 1)
            now.counts["preempted"] += len(step.preempted_req_ids or ())
            plans = step.kv_connector_metadata.plans
            now.counts["set_aside"] += sum(plan.spread for plan in plans)
            return step

        self._scheduler.schedule = counting

    def _prompt(self) -> list[int]:
        dice = self._dice
        prompt = self._tokens(dice.randrange(1, 40))
        for document in dice.sample(self._documents + self._frozen.texts(), dice.randrange(1, 3)):
            prompt += document + self._tokens(dice.randrange(1, 20))
        return prompt

    def _tokens(self, count: int) -> list[int]:
        return self._dice.choices(range(300, shapes.VOCAB_SIZE), k=count)


class _Errors(logging.Handler):
    """Counts what the plugin logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def resident_mb() -> float:
    """Memory of this process that is in RAM and backed by no file.

    Pages of files (libraries, the model) come and go as the system needs room for others.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def slope_per_1k(samples: Sequence[tuple[int, float]]) -> float:
    """Slope of the straight line through (request, MB), in MB per 1,000 requests."""
    numbers, memory = np.asarray(samples, dtype=float).T
    return 1e3 * float(np.polyfit(numbers, memory, 1)[0])
