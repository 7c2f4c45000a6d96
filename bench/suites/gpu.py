# SPDX-License-Identifier: Apache-2.0
"""On a GPU: time to the first token by shape, context and reuse; decoding; what others wait for.

Parts, each within ten minutes, chosen by `--part` (all of them if none is named):

headline    one model of eight billion parameters, 16,384 and 65,536 tokens, then 4,096 and 32,768:
            full prefill against every policy; then what sets the pace of each pass. The first to
            run on a new machine.
ttft-SHAPE  concurrency 1: full prefill against every policy, at several contexts and shares of
            reused tokens. The break-even point follows: the fewest reused tokens that still pay.
sizes       sparse-query attention with programs of several sizes: which are fastest.
pass        the sparse pass by itself: the host's time for each layer, the device's share of it all,
            the kernels that take longest.
decode      `vllm bench serve` without segment requests: vLLM alone against the plugin.
serve       `vllm bench serve` at saturation, prompts of known documents: full against reuse.
others      inter-token latency of decoding requests while a long prompt is in flight beside them.

The last three share their servers. What a part has found is written before the next one begins, in
`headline` also before its next step, so that a run which is cut off, or a part that fails, loses
nothing but its own.

`--quick` runs everything on a tiny shape, on the CPU too: that is the suite's own test.
`SEGREUSE_BENCH_BACKEND` names an attention backend other than vLLM's choice,
`SEGREUSE_BENCH_CAPTURE` the tokens of the largest CUDA graph, `SEGREUSE_BENCH_TRACES` a folder for
profiles of a request of each policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd import DeviceType

from bench import engine, harness
from bench.gpu import common, models, passes, serving, sizes, ttft

SERVED_TOKENS = 16384
PARTS = (
    "headline",
    *(f"ttft-{shape}" for shape in ttft.LOADS if shape != "tiny"),
    *("sizes", "pass", *serving.PARTS),
)
KEEPS_PARTS = True
"""`run` takes `keep`."""


def run(
    quick: bool,
    parts: Sequence[str] = (),
    keep: Callable[[harness.SuiteResult], None] = lambda result: None,
) -> harness.SuiteResult:
    """Run the parts named, or all; `keep` is given what is found so far, after each."""
    on_gpu = torch.cuda.is_available()
    if not (quick or on_gpu):
        raise harness.BenchError("there is no GPU here; --quick runs a tiny shape on the CPU")
    engine.prepare_environment(2)
    result: harness.SuiteResult = {"rows": [], "summary": {"device": common.device()}}
    parts = parts or (("ttft-tiny", "decode", "others") if quick else PARTS)
    for found, figures in _found(parts, quick, on_gpu):
        result = {"rows": [*result["rows"], *found], "summary": {**result["summary"], **figures}}
        keep(result)
    return result


def _found(parts: Sequence[str], quick: bool, on_gpu: bool) -> Iterator[common.Found]:
    """What each part finds; those that need servers come last."""
    served = [part for part in parts if part in serving.PARTS]
    for part in parts:
        if part not in served:
            yield from _part(part, quick, on_gpu)
    if served:
        shape, tokens = ("tiny", 256) if quick else (ttft.HEADLINE[0], SERVED_TOKENS)
        yield from serving.run(served, models.make_model(shape), tokens, quick)


def _part(part: str, quick: bool, on_gpu: bool) -> Iterator[common.Found]:
    if part == "headline":
        yield from _headline(quick, on_gpu)
    elif part == "sizes":
        if not on_gpu:
            raise harness.BenchError("part sizes: only a GPU can show which sizes are fast")
        yield sizes.run()
    elif part == "pass":
        # Quick: whole blocks, nearly, so that the CPU has next to nothing to compute.
        yield passes.run(528 if quick else ttft.HEADLINE[1], on_gpu and not quick)
    else:
        yield ttft.run("tiny" if quick else part.removeprefix("ttft-"), eager=quick)


def _headline(quick: bool, on_gpu: bool) -> Iterator[common.Found]:
    """Cell by cell, those first that say most, should the time not suffice for all."""
    shape, tokens, share = ("tiny", 1024, 0.98) if quick else ttft.HEADLINE
    far, few, many = (2 * tokens, 1, 1) if quick else (ttft.FAR, 3, 8)
    loads = [
        ttft.Load((context,), (known,), rounds)
        for known in (share, 0.9)
        for context, rounds in ((tokens, many), (far, few))
    ]
    if not quick:
        loads.append(ttft.Load((tokens // 4,), (share, 0.9), many))
        loads.append(ttft.Load((far // 2,), (share, 0.9), few))
    rows: list[harness.Row] = []
    with common.running(shape, far + 64, eager=quick) as llm:
        for load in loads:
            here = ttft.measured(llm, shape, load)
            rows += here
            yield here, ttft.summary(rows)
            if load is loads[0]:
                ttft.write_traces(llm, shape, tokens, share)
        yield passes.measured(llm, shape, tokens, DeviceType.CUDA if on_gpu else DeviceType.CPU)
