# SPDX-License-Identifier: Apache-2.0
"""On a GPU: time to the first token by shape, context and reuse; decoding; what others wait for.

Parts, each within ten minutes, chosen by `--part` (all of them if none is named):

ttft-SHAPE  concurrency 1: full prefill against every policy, at several contexts and shares of
            reused tokens. The break-even point follows: the fewest reused tokens that still pay.
decode      `vllm bench serve` without segment requests: vLLM alone against the plugin.
serve       `vllm bench serve` at saturation, prompts of known documents: full against reuse.
others      inter-token latency of decoding requests while long prompts come in.

`--quick` runs everything on a tiny shape, on the CPU too: that is the suite's own test.
`SEGREUSE_BENCH_BACKEND` names an attention backend other than vLLM's choice.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench import engine, harness
from bench.gpu import models, serving

BLOCK_TOKENS = 16
DOCUMENTS = 4
NAMESPACE = ["bench-gpu"]
HEADLINE = ("qwen3-8b", 16384, 0.98)


class Policy(NamedTuple):
    """One way to prefill a prompt; `name` None is vLLM's own."""

    label: str
    name: str | None = None
    ratio: float | None = None
    dense_share: float = 0.0
    dense_layers: int = 0

    def extra_args(self, layers: int) -> dict[str, Any] | None:
        """What a request carries in `SamplingParams.extra_args`."""
        if self.name is None:
            return None
        options: dict[str, Any] = {"extra_keys": NAMESPACE, "segreuse_policy": self.name}
        options["segreuse_min_reused_tokens"] = 16
        if self.ratio is not None:
            options["segreuse_recompute_ratio"] = self.ratio
        if self.name == "sparsex":
            share = round(self.dense_share * layers)
            options["segreuse_dense_layers"] = self.dense_layers or share
        return options


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
    "qwen3-8b": Load((4096, 16384, 32768, 65536), (0.5, 0.9, 0.98), 5),
    "llama-3.1-8b": Load((16384, 65536), (0.9, 0.98), 3),
    "qwen3-30b-a3b": Load((16384, 65536), (0.9, 0.98), 3),
    "tiny": Load((512, 1024), (0.5, 0.9), 1),
}
SERVED_TOKENS = 16384
PARTS = (*(f"ttft-{shape}" for shape in LOADS if shape != "tiny"), "decode", "serve", "others")


def run(quick: bool, parts: Sequence[str] = ()) -> harness.SuiteResult:
    """Run the parts named, or all."""
    if not quick:
        _require_gpu()
    engine.prepare_environment(2)
    rows: list[harness.Row] = []
    summary: dict[str, float | str] = {"device": _device()}
    chosen = parts or (("ttft-tiny", "decode", "others") if quick else PARTS)
    for part in chosen:
        if part.startswith("ttft-"):
            shape = "tiny" if quick else part.removeprefix("ttft-")
            found = list(_ttft(shape, eager=quick))
            rows += found
            summary |= _ttft_summary(found)
        else:
            shape, tokens = ("tiny", 256) if quick else (HEADLINE[0], SERVED_TOKENS)
            found, figures = serving.run(part, models.make_model(shape), tokens, quick)
            rows += found
            summary |= figures
    return {"rows": rows, "summary": summary}


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise harness.BenchError("there is no GPU here; --quick runs a tiny shape on the CPU")


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


class Prompts:
    """Prompts of a context's length of which a share is in documents seen before."""

    def __init__(self, tokens: int, share: float, seed: int) -> None:
        self._draw = random.Random(seed)
        self._new = max(DOCUMENTS + 1, tokens - int(tokens * share))
        size = (tokens - self._new) // DOCUMENTS
        self.documents = [self._fresh(size) for _ in range(DOCUMENTS)]
        self._orders = itertools.cycle(list(itertools.permutations(range(DOCUMENTS)))[1:])

    @property
    def donated_tokens(self) -> int:
        """Documents without the ends that fill no block: what is surely found again."""
        block = engine.BLOCK_TOKENS  # the larger of the two sizes in use
        return sum(len(document) // block * block for document in self.documents)

    def next(self) -> list[int]:
        """New tokens before each document, in an order of its own, and behind the last."""
        gaps = [self._new // (DOCUMENTS + 1)] * DOCUMENTS
        prompt = list[int]()
        for gap, index in zip(gaps, next(self._orders), strict=True):
            prompt += self._fresh(gap) + self.documents[index]
        return prompt + self._fresh(self._new - sum(gaps))

    def _fresh(self, count: int) -> list[int]:
        return self._draw.choices(range(300, 8192), k=count)


def _ttft(shape: str, eager: bool) -> Iterator[harness.Row]:
    load = LOADS[shape]
    layers = int(models.SHAPES[shape]["num_hidden_layers"])
    on_cpu = _device() == "CPU"
    options: dict[str, Any] = {} if on_cpu else {"gpu_memory_utilization": 0.92}
    if backend := os.environ.get(serving.BACKEND):
        options["attention_backend"] = backend
    with engine.engine(
        models.make_model(shape),
        segreuse=True,
        max_model_len=max(load.contexts) + 64,
        max_num_batched_tokens=8192,
        load_format="dummy",
        enforce_eager=eager,
        block_size=engine.BLOCK_TOKENS if on_cpu else BLOCK_TOKENS,
        **options,
    ) as llm:
        cells = list(itertools.product(load.contexts, load.shares))
        for number, (tokens, share) in enumerate(harness.progress(cells, f"ttft {shape}")):
            prompts = Prompts(tokens, share, seed=number)
            yield from _cell(llm, shape, layers, prompts, tokens, share, load.rounds)


def _cell(
    llm: Any, shape: str, layers: int, prompts: Prompts, tokens: int, share: float, rounds: int
) -> Iterator[harness.Row]:
    taken: dict[str, list[engine.Timed]] = {policy.label: [] for policy in POLICIES}
    for turn in range(rounds + 1):
        for document in prompts.documents:  # a long round may have driven them out
            engine.first_token(llm, document, {"extra_keys": NAMESPACE})
        for policy in harness.rotated(POLICIES, turn):
            timed = engine.first_token(llm, prompts.next(), policy.extra_args(layers))
            if policy.name is not None:
                engine.require_reuse(timed, policy.name, prompts.donated_tokens)
            if turn:  # the first round warms up
                taken[policy.label].append(timed)
    full = statistics.median(timed.ms for timed in taken["full"])
    for policy in POLICIES:
        times = [timed.ms for timed in taken[policy.label]]
        report = taken[policy.label][-1].report or {}
        computed = float(report.get("computed_share", 1.0))
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
            "speedup": speedup,
            "efficiency": speedup * computed,
            "rounds": len(times),
        }


def _ttft_summary(rows: list[harness.Row]) -> dict[str, float]:
    """What must be shown, and the fewest reused tokens from which on each policy paid."""
    shape = rows[0]["shape"]
    summary: dict[str, float] = {}
    here = [row for row in rows if (row["shape"], row["tokens"], row["share"]) == HEADLINE]
    by_policy = {row["policy"]: row for row in here}
    if by_policy:
        summary["shift_speedup"] = by_policy["shift"]["speedup"]
        summary["hybrid_efficiency"] = by_policy["hybrid"]["efficiency"]
        summary["one_dense_speedup"] = by_policy["one_dense"]["speedup"]
        cheap = [
            row["speedup"]
            for row in here
            if row["computed_share"] <= 0.07 and row["policy"] not in ("full", "shift")
        ]
        summary["best_speedup_at_7_percent"] = max(cheap, default=0.0)
    for policy in {row["policy"] for row in rows} - {"full"}:
        summary[f"break_even_tokens_{shape}_{policy}"] = break_even(
            [row for row in rows if row["policy"] == policy]
        )
    return summary


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
