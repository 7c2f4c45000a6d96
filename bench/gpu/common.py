# SPDX-License-Identifier: Apache-2.0
"""What the parts of the suite `gpu` share: policies, prompts, the engine of this process."""

from __future__ import annotations

import cProfile
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from bench import engine, harness
from bench.gpu import models

BACKEND = "SEGREUSE_BENCH_BACKEND"
CAPTURE = "SEGREUSE_BENCH_CAPTURE"
"""Tokens of the largest CUDA graph, where it is not what vLLM chooses."""
TRACES = "SEGREUSE_BENCH_TRACES"
"""Names a folder for profiles: chrome://tracing shows those of host and device."""
BLOCK_TOKENS = 16
KV_BYTES = 30 << 30
DOCUMENTS = 4
NAMESPACE = ["bench-gpu"]

Found = tuple[list[harness.Row], dict[str, float | str]]
"""Rows and figures of a part."""


def device() -> str:
    """What the figures are of."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def running(shape: str, max_model_len: int, eager: bool) -> AbstractContextManager[Any]:
    """An engine that reuses segments, on a model whose weights are made up."""
    on_cpu = not torch.cuda.is_available()
    # Given, not measured: vLLM's measurement needs the GPU for itself.
    kv_bytes = KV_BYTES // 16 if shape == "thin" else KV_BYTES
    memory = {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": kv_bytes}
    options: dict[str, Any] = {} if on_cpu else dict[str, Any](memory)
    if backend := os.environ.get(BACKEND):
        options["attention_backend"] = backend
    if tokens := os.environ.get(CAPTURE):
        options["max_cudagraph_capture_size"] = int(tokens)
    return engine.engine(
        models.make_model(shape),
        segreuse=True,
        max_model_len=max_model_len,
        max_num_batched_tokens=8192,
        load_format="dummy",
        enforce_eager=eager,
        block_size=engine.BLOCK_TOKENS if on_cpu else BLOCK_TOKENS,
        **options,
    )


@contextmanager
def watched_passes(watch: Callable[[Callable[[list[Any]], Any], list[Any]], Any]) -> Iterator[Any]:
    """Meanwhile the worker of this process's engine calls `watch(take, plans)` instead of
    `take(plans)`, once a step; yields what holds its plans (`prefill/backlog.py`)."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    backlog: Any = get_kv_transfer_group().worker_side.backlog
    take = backlog.take
    backlog.take = lambda plans: watch(take, plans)
    try:
        yield backlog
    finally:
        del backlog.take  # hides the class's own


def write_trace(name: str, work: Callable[[], object]) -> None:
    """Do some work, twice, if there is a folder for profiles: `NAME.json.gz` there is what host and
    device did for it, `NAME.prof` in which functions of Python the host was (`pstats`)."""
    folder = os.environ.get(TRACES)
    if not folder:
        return
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as taken:
        work()
    taken.export_chrome_trace(str(Path(folder, f"{name}.json.gz")))
    functions = cProfile.Profile()
    functions.runcall(work)
    functions.dump_stats(Path(folder, f"{name}.prof"))


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
