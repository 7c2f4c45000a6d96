# SPDX-License-Identifier: Apache-2.0
"""Part `pass` of the suite `gpu`: what sets the pace of the sparse pass, the device or the host
that starts its kernels.

The plan of a real request is carried out again and again, with nothing else in the engine: as it
is, without vLLM's CUDA graphs, and in chunks of no more than the largest of these. First on
a model with the layers of the real one and next to no width: that takes as long as the host does.
Then, on a GPU, on the real one, under the profiler: the time in which kernels ran is the device's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import engine, harness
from bench.gpu import models
from bench.gpu.common import (
    NAMESPACE,
    Found,
    Policy,
    Prompts,
    running,
    watched_passes,
    write_trace,
)
from bench.gpu.ttft import HEADLINE

POLICIES = (
    Policy("shift", "shift"),
    Policy("thousand", "sparsex", 0.04),  # of 16,384 tokens, with the new ones
    Policy("one_dense", "sparsex", 0.05, dense_layers=1),
    Policy("focus", "focus", 0.03),
)
ROUNDS = 20
HEAVIEST = 8


class Busy(NamedTuple):
    """What ran under one name while a pass was profiled."""

    name: str
    calls: int
    ms: float


def run(tokens: int, on_gpu: bool) -> Found:
    """The pass of every policy on the thin model; on a GPU on the real one, too."""
    with running("thin", tokens + 64, eager=False) as llm:
        rows, figures = measured(llm, "thin", tokens, None)
    if on_gpu:
        shape = HEADLINE[0]
        with running(shape, tokens + 64, eager=False) as llm:
            more, of_device = measured(llm, shape, tokens, DeviceType.CUDA)
        rows, figures = rows + more, figures | of_device
    return rows, figures


def measured(llm: Any, shape: str, tokens: int, profiled: DeviceType | None) -> Found:
    """The pass of every policy in an engine that runs the shape.

    Args:
        tokens: of the prompt.
        profiled: the device whose work is profiled; None: none.
    """
    layers = models.num_layers(shape)
    rows: list[harness.Row] = []
    figures: dict[str, float | str] = {}
    prompts = Prompts(tokens, HEADLINE[2], seed=1)
    for document in prompts.documents:
        engine.first_token(llm, document, {"extra_keys": NAMESPACE})
    for policy in POLICIES:
        prefill, plan = planned(llm, prompts, policy.extra_args(layers))
        work = partial(prefill.run, [plan])  # ends once the device has answered
        wall_ms = _median_ms(work)
        runner = prefill.runner
        with patch.object(runner, "graphs", None):
            without_graphs_ms = _median_ms(work)
        settings = runner.settings
        if runner.graphs is not None:
            settings = settings._replace(max_chunk_tokens=runner.graphs.sizes[-1])
        with patch.object(runner, "settings", settings):
            in_graphs_ms = _median_ms(work)
        write_trace(f"{shape}-{policy.label}-again", work)
        us_per_layer = 1e3 * wall_ms / layers
        row: harness.Row = {
            "shape": shape,
            "policy": policy.label,
            "most_active": plan.active_tokens,
            "layer_tokens": plan.layer_tokens(prefill.layers),
            "wall_ms": wall_ms,
            "without_graphs_ms": without_graphs_ms,
            "in_graphs_ms": in_graphs_ms,
            "us_per_layer": us_per_layer,
        }
        rows.append(row)
        if profiled is None:
            figures[f"host_us_per_layer_{policy.label}"] = us_per_layer
            continue
        ran = busy(work, profiled)
        busy_ms = sum(it.ms for it in ran)
        row |= {"busy_ms": busy_ms, "kernels": sum(it.calls for it in ran)}
        rows += [{"policy": policy.label, **it._asdict()} for it in ran[:HEAVIEST]]
        figures[f"device_busy_share_{policy.label}"] = busy_ms / wall_ms
    return rows, figures


def planned(llm: Any, prompts: Prompts, extra_args: dict[str, Any] | None) -> tuple[Any, Any]:
    """Sends a prompt; the worker's sparse pass, and the plan that it carried out."""
    seen = list[Any]()

    def noting(take: Callable[[list[Any]], Any], plans: list[Any]) -> Any:
        seen.extend(plans)
        return take(plans)

    with watched_passes(noting) as backlog:
        engine.first_token(llm, prompts.next(), extra_args)
    if len(seen) != 1:
        raise harness.BenchError(f"one prompt made {len(seen)} plans: {extra_args}")
    return backlog.prefill, seen[0]


def _median_ms(work: Callable[[], object]) -> float:
    times = list[float]()
    for _ in range(ROUNDS + 2):
        started = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def busy(work: Callable[[], object], device: DeviceType) -> list[Busy]:
    """What ran on the device, the longest first.

    Args:
        work: runs what is to be profiled, and waits for it.
        device: CUDA: kernels and copies; CPU: operators, without those that they call.
    """
    activities = [ProfilerActivity.CPU]
    if device == DeviceType.CUDA:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as taken:
        work()
    time_of = "self_cpu_time_total" if device == DeviceType.CPU else "self_device_time_total"
    found = [
        Busy(event.key[:60], event.count, getattr(event, time_of) / 1e3)
        for event in taken.key_averages()
        if event.device_type == device and not event.is_user_annotation
    ]
    if not found:
        raise harness.BenchError(f"the profiler saw nothing run on {device.name}")
    return sorted(found, key=lambda it: -it.ms)
