# SPDX-License-Identifier: Apache-2.0
"""Parts of the suite `gpu` that need a server: vLLM alone against the plugin, and what others wait
for."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import harness, streams
from bench.gpu.common import BACKEND, NAMESPACE, Found, Policy
from bench.server import SEGREUSE_COMMAND, VLLM_COMMAND, Server

PARTS = ("decode", "serve", "others")
_START_S = 200
_TURNS = 4
_FIGURES = (
    *("completed", "failed", "output_throughput", "total_token_throughput"),
    *("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms"),
)


class Load(NamedTuple):
    """Requests of `vllm bench serve`."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int


def run(parts: Sequence[str], model: Path, tokens: int, quick: bool) -> Iterator[Found]:
    """What each part finds, by name; all that need the plugin ask one server."""
    if "serve" in parts and importlib.util.find_spec("pandas") is None:
        raise harness.BenchError(
            "part serve: `vllm bench serve` reads prompts with pandas: pip install pandas"
        )
    # The stack is left first: a server that is stopped ends the thread that waits for it.
    with ThreadPoolExecutor() as starting, contextlib.ExitStack() as stack:
        names = ("segreuse", "vllm") if "decode" in parts else ("segreuse",)
        servers = {name: _server(model, tokens, name == "segreuse", quick) for name in names}
        for server in servers.values():
            stack.callback(server.stop)
        list(starting.map(Server.start, servers.values()))  # each takes a minute or two on a GPU
        for part in parts:
            if part == "decode":
                rows, figures = _decode(servers, model, quick)
            elif part == "serve":
                rows, figures = _saturated(servers["segreuse"], model, tokens, quick)
            else:
                rows, figures = _others(servers["segreuse"], model, tokens, quick)
            yield [{"part": part, **row} for row in rows], figures


def _server(model: Path, tokens: int, plugin: bool, quick: bool) -> Server:
    args = ["--load-format", "dummy", "--max-model-len", str(2 * tokens)]
    args += ["--max-num-batched-tokens", "8192" if not quick else str(2 * tokens)]
    args += ["--no-enable-log-requests", "--block-size", "32" if quick else "16"]
    if quick:
        args.append("--enforce-eager")
    else:
        # Given, since two servers that start at once would measure each other's memory. Each asks
        # for so little that the other's weights may be there already.
        fifth = torch.cuda.get_device_properties(0).total_memory // 5
        args += ["--kv-cache-memory-bytes", str(fifth), "--gpu-memory-utilization", "0.3"]
        args += ["--max-num-seqs", "256"]
    if backend := os.environ.get(BACKEND):
        args += ["--attention-backend", backend]
    command = SEGREUSE_COMMAND if plugin else VLLM_COMMAND
    environment = {"VLLM_LOGGING_LEVEL": "INFO"}
    if not plugin:
        environment["VLLM_PLUGINS"] = "none"
    return Server(model, args, environment, command=command, start_timeout_s=_START_S)


def bench_serve(server: Server, model: Path, options: list[str]) -> dict[str, Any]:
    """What `vllm bench serve` finds on a server.

    In this process: importing vLLM takes longer than most measurements. The command itself does not
    start with vLLM's CPU wheel.

    Raises:
        BenchError: a request failed, so that the others had the server to themselves.
    """
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    arguments = ["--base-url", server.url, "--model", server.model_name]
    arguments += ["--tokenizer", str(model), "--percentile-metrics", "ttft,itl", "--disable-tqdm"]
    arguments += ["--metric-percentiles", "50,99", "--ignore-eos", *options]
    with contextlib.redirect_stdout(io.StringIO()):  # its own table
        asked = parser.parse_args(arguments)
        found: dict[str, Any] = serve.main(asked)
    if found["completed"] != asked.num_prompts:
        raise harness.BenchError(
            f"vllm bench serve completed {found['completed']} of {asked.num_prompts} requests "
            f"({found['failed']} failed): see the log of the server, {server.log}"
        )
    return found


def _row(name: str, found: dict[str, Any]) -> harness.Row:
    return {"server": name, **{key: found[key] for key in _FIGURES}}


def _decode(servers: Mapping[str, Server], model: Path, quick: bool) -> Found:
    """Requests without extra keys, on vLLM alone and with the plugin, in turns."""
    load = Load(8, 32, 16, 4) if quick else Load(256, 128, 256, 128)
    options = ["--dataset-name", "random", "--random-input-len", str(load.prompt_tokens)]
    options += ["--random-output-len", str(load.output_tokens)]
    options += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for turn in range(_TURNS + 1):
        for name in harness.rotated(list(servers), turn):
            seeded = [*options, "--seed", str(turn + 1)]
            found[name].append(bench_serve(servers[name], model, seeded))
    rows, figures = [], dict[str, float | str]()
    for name, each in found.items():
        del each[0]  # warmed up
        rows += [_row(name, one) for one in each]
    for figure, key, better in (
        ("decode_throughput_ratio", "output_throughput", "segreuse"),
        ("decode_itl_ratio", "p50_itl_ms", "vllm"),
    ):
        worse = next(name for name in servers if name != better)
        above, below = ([one[key] for one in found[name]] for name in (better, worse))
        figures[figure] = statistics.median(above) / statistics.median(below)
    return rows, figures


POLICIES = (
    Policy("full"),
    Policy("shift", "shift"),
    Policy("hybrid", "sparsex", 0.1, dense_layers=5),
    Policy("focus", "focus", 0.03),
)


def _xargs(policy: Policy) -> dict[str, Any]:
    extra_args = policy.extra_args(layers=0)  # no share of the layers is asked for here
    return {} if extra_args is None else {"vllm_xargs": extra_args}


def _saturated(server: Server, model: Path, tokens: int, quick: bool) -> Found:
    """As many prompts as the server takes, 98 % of each known."""
    texts = streams.Texts(model, tokens, 0.98)
    rows, figures = [], dict[str, float | str]()
    with tempfile.TemporaryDirectory() as folder:
        for policy in POLICIES:
            file = Path(folder, f"{policy.label}.jsonl")
            count = 8 if quick else 32
            lines = [json.dumps({"prompt": texts.prompt()}) for _ in range(count)]
            file.write_text("\n".join(lines))
            options = ["--dataset-name", "custom", "--dataset-path", str(file)]
            options += ["--num-prompts", str(count), "--custom-output-len", "64"]
            options += ["--skip-chat-template", "--extra-body", json.dumps(_xargs(policy))]
            # Anew: prompts without reuse drive documents out.
            streams.know(server, texts, NAMESPACE)
            reused = streams.reused_tokens(server)
            found = bench_serve(server, model, options)
            # Prompts that run at the same time need the whole cache, and drive documents out.
            known = count * texts.known_tokens
            share = streams.reused_share(server, policy.name, reused, known, least=0.5)
            rows.append({**_row(policy.label, found), "reused_share": share})
            figures[f"served_{policy.label}_per_s"] = found["request_throughput"]
    full = float(figures["served_full_per_s"])
    for name in ("shift", "hybrid", "focus"):
        figures[f"served_{name}_ratio"] = float(figures[f"served_{name}_per_s"]) / full
    return rows, figures


def _others(server: Server, model: Path, tokens: int, quick: bool) -> Found:
    """Inter-token latency of decoding requests beside prompts of known documents."""
    texts = streams.Texts(model, tokens, 0.9)
    rows, p99 = [], {}
    for policy in POLICIES:
        load = (2, 2) if quick else (16, 12)
        beside = partial(streams.decode_beside, server, texts, _xargs(policy))
        streams.know(server, texts, NAMESPACE)
        asyncio.run(beside(1, 1))  # warms up
        streams.know(server, texts, NAMESPACE)
        reused = streams.reused_tokens(server)
        found = asyncio.run(beside(*load))
        streams.reused_share(server, policy.name, reused, load[1] * texts.known_tokens)
        p99[policy.label] = found.p99_gap_ms
        rows.append({"server": policy.label, **found.row()})
    figures = {f"others_beside_p99_ratio_{name}": p99[name] / p99["full"] for name in p99}
    return rows, dict[str, float | str](figures)
