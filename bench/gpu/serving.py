# SPDX-License-Identifier: Apache-2.0
"""Parts of the suite `gpu` that need a server: vLLM alone against the plugin, and what others wait
for."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench import harness, streams
from bench.gpu.common import BACKEND, NAMESPACE, Found, Policy
from bench.server import SEGREUSE_COMMAND, VLLM_COMMAND, Server

_BENCH = (
    *(sys.executable, "-c"),
    # As `vllm bench serve` does; the command itself does not start with vLLM's CPU wheel.
    "from vllm.benchmarks import serve; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); serve.add_cli_args(parser); "
    "serve.main(parser.parse_args())",
)
_LIMIT_S = 280
_FIGURES = (
    *("completed", "output_throughput", "total_token_throughput"),
    *("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms"),
)


class Load(NamedTuple):
    """Requests of `vllm bench serve`."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int


def run(part: str, model: Path, tokens: int, quick: bool) -> Found:
    """One part, by name."""
    if part == "decode":
        load = Load(8, 32, 16, 4) if quick else Load(512, 128, 256, 128)
        return _decode(model, tokens, load, quick)
    if part == "serve":
        return _saturated(model, tokens, quick)
    if part == "others":
        return _others(model, tokens, quick)
    raise harness.BenchError(f"no part is named {part!r}")


def _server(model: Path, tokens: int, plugin: bool, quick: bool) -> Server:
    args = ["--load-format", "dummy", "--max-model-len", str(2 * tokens)]
    args += ["--max-num-batched-tokens", "8192" if not quick else str(2 * tokens)]
    args += ["--no-enable-log-requests", "--block-size", "32" if quick else "16"]
    if quick:
        args.append("--enforce-eager")
    if backend := os.environ.get(BACKEND):
        args += ["--attention-backend", backend]
    command = SEGREUSE_COMMAND if plugin else VLLM_COMMAND
    environment = {} if plugin else {"VLLM_PLUGINS": "none"}
    return Server(model, args, environment, command=command, start_timeout_s=400)


def bench_serve(server: Server, model: Path, options: list[str]) -> dict[str, Any]:
    """`vllm bench serve` against a server; its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_BENCH, "--base-url", server.url, "--model", server.model_name]
        command += ["--tokenizer", str(model), "--save-result", "--result-dir", folder]
        command += ["--result-filename", "result.json", "--percentile-metrics", "ttft,itl"]
        command += ["--metric-percentiles", "50,99", "--ignore-eos", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        result = Path(folder, "result.json")
        if done.returncode or not result.exists():
            raise harness.BenchError(f"vllm bench serve failed: {done.stderr[-1500:]}")
        found: dict[str, Any] = json.loads(result.read_text())
    if found["completed"] == 0:
        raise harness.BenchError("vllm bench serve completed no request")
    return found


def _row(name: str, found: dict[str, Any]) -> harness.Row:
    return {"server": name, **{key: found[key] for key in _FIGURES}}


def _decode(model: Path, tokens: int, load: Load, quick: bool) -> Found:
    """Requests without extra keys, on vLLM alone and with the plugin."""
    options = ["--dataset-name", "random", "--random-input-len", str(load.prompt_tokens)]
    options += ["--random-output-len", str(load.output_tokens)]
    options += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)]
    rows, figures = [], {}
    for name, plugin in (("vllm", False), ("segreuse", True)):
        with _server(model, tokens, plugin, quick) as server:
            bench_serve(server, model, [*options, "--seed", "1"])  # warms up
            found = [bench_serve(server, model, [*options, "--seed", str(s)]) for s in (2, 3, 4)]
        rows += [_row(name, each) for each in found]
        figures[name] = (
            statistics.median(each["output_throughput"] for each in found),
            statistics.median(each["p50_itl_ms"] for each in found),
        )
    (plain, plain_itl), (with_plugin, plugin_itl) = figures["vllm"], figures["segreuse"]
    return rows, {
        "decode_throughput_ratio": with_plugin / plain,
        "decode_itl_ratio": plain_itl / plugin_itl,
    }


POLICIES = (
    Policy("full"),
    Policy("shift", "shift"),
    Policy("hybrid", "sparsex", 0.1, dense_layers=5),
    Policy("focus", "focus", 0.03),
)


def _xargs(policy: Policy) -> dict[str, Any]:
    extra_args = policy.extra_args(layers=0)  # no share of the layers is asked for here
    return {} if extra_args is None else {"vllm_xargs": extra_args}


def _saturated(model: Path, tokens: int, quick: bool) -> Found:
    """As many prompts as the server takes, 98 % of each known."""
    if importlib.util.find_spec("pandas") is None:
        raise harness.BenchError(
            "part serve: `vllm bench serve` reads prompts with pandas: pip install pandas"
        )
    texts = streams.Texts(model, tokens, 0.98)
    rows, figures = [], dict[str, float | str]()
    with _server(model, tokens, True, quick) as server, tempfile.TemporaryDirectory() as folder:
        streams.know(server, texts, NAMESPACE)
        for policy in POLICIES:
            file = Path(folder, f"{policy.label}.jsonl")
            count = 8 if quick else 48
            lines = [json.dumps({"prompt": texts.prompt()}) for _ in range(count)]
            file.write_text("\n".join(lines))
            options = ["--dataset-name", "custom", "--dataset-path", str(file)]
            options += ["--num-prompts", str(count), "--custom-output-len", "64"]
            options += ["--skip-chat-template", "--extra-body", json.dumps(_xargs(policy))]
            found = bench_serve(server, model, options)
            rows.append(_row(policy.label, found))
            figures[f"served_{policy.label}_per_s"] = found["request_throughput"]
    full = float(figures["served_full_per_s"])
    for name in ("shift", "hybrid", "focus"):
        figures[f"served_{name}_ratio"] = float(figures[f"served_{name}_per_s"]) / full
    return rows, figures


def _others(model: Path, tokens: int, quick: bool) -> Found:
    """Inter-token latency of decoding requests while prompts of known documents come in."""
    texts = streams.Texts(model, tokens, 0.9)
    rows, p99 = [], {}
    with _server(model, tokens, True, quick) as server:
        streams.know(server, texts, NAMESPACE)
        for policy in POLICIES:
            load = (2, 2) if quick else (16, 12)
            beside = partial(streams.decode_beside, server, texts, _xargs(policy))
            asyncio.run(beside(1, 1))  # warms up
            found = asyncio.run(beside(*load))
            p99[policy.label] = found.p99_gap_ms
            rows.append({"server": policy.label, **found.row()})
    figures = {f"others_itl_p99_ratio_{name}": p99[name] / p99["full"] for name in p99}
    return rows, dict[str, float | str](figures)
