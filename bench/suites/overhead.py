# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs requests that do not use it, over HTTP.

Two servers on the same cores: vLLM alone (no plugin is even loaded), and vLLM with segment reuse
enabled. Both get the same batches of requests without extra keys, taking turns: one works while the
processes of the other are halted, which would spin for some seconds otherwise. Before each of its
batches a server wakes up over a shorter one, which is not timed. A ratio is the median over all
batches of (time of vLLM alone) / (time with the plugin): 1.0 means that it costs nothing. Its
interval of 95 % is that of the median.

- `throughput_ratio`: the servers bind their threads to cores as vLLM does by default, which sets
  one aside for its scheduler (`compute_cores` of the rows).
- `throughput_ratio_bound`: both compute on all cores (`VLLM_CPU_OMP_THREADS_BIND`).
- `throughput_ratio_beside_reuse`: the same, while each batch has prompts of known documents beside
  it. With the plugin these reuse segments, without it they are prefilled.

And, where they are asked for by `--part`:

- `stages`, `throughput_ratio_stages`: both have two pipeline stages, each with a core of its own.
  They are compiled in the quick form, too: eager engines for CPUs fail at their first step there.
  With any connector vLLM waits for the answers of all stages, else for the last one's. What that
  costs is told apart: `throughput_ratio_stages_idle` is of vLLM with a connector that does nothing.
  Servers are started anew a few times, since starts differ by more than batches do.
- `hosted`, `throughput_ratio_hosted`: a prefill server whose connector, NIXL's, moves nothing. With
  the plugin segment reuse hosts it (`configs/prefill.yaml`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import openai

from bench import harness, shapes
from bench.server import (
    SEGREUSE_COMMAND,
    VLLM_COMMAND,
    Server,
    ServerError,
    free_port,
    with_tokens,
)

SHAPE = "bench8"
SERVERS = ("plain", "segreuse")
IDLE = "idle"
"""vLLM with a connector that does nothing (`bench/idle_connector.py`)."""
USUAL, STAGES, HOSTED = PARTS = ("usual", "stages", "hosted")
NAMESPACE = ["bench-overhead"]
PREFILL = harness.REPOSITORY / "configs" / "prefill.yaml"
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
"""What `PREFILL` hosts, by itself."""
NOTHING = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "bench.idle_connector",
    "kv_role": "kv_both",
}

_FIRST_TEXT_TOKEN = 300  # below are special tokens and single bytes
_KNOWN_DOCUMENTS = 2
WAKING_TOKENS = 8
"""Of each answer of the batch that wakes a server."""

_START_S = 900  # compiling takes a minute or two on a busy machine


class Load(NamedTuple):
    """How much is asked: some batches, each of requests that run together."""

    batches: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    document_tokens: int

    @property
    def batch_tokens(self) -> int:
        """Tokens that one batch computes, those beside it not counted."""
        return self.requests * (self.prompt_tokens + self.output_tokens)


FULL = Load(batches=100, requests=8, prompt_tokens=256, output_tokens=32, document_tokens=512)
QUICK = Load(batches=8, requests=4, prompt_tokens=128, output_tokens=16, document_tokens=256)


class Comparison(NamedTuple):
    """One pair of servers and what they are asked.

    Attributes:
        name: the summary's key.
        bound: whether both servers compute on all cores.
        beside: prompts of known documents that come with each batch.
        part: of the suite.
        servers: that take turns.
        starts: how often they are started; each start takes a part of the batches.
    """

    name: str
    bound: bool
    beside: int
    part: str = USUAL
    servers: Sequence[str] = SERVERS
    starts: int = 1


COMPARISONS = (
    Comparison("throughput_ratio", bound=False, beside=0),
    Comparison("throughput_ratio_bound", bound=True, beside=0),
    Comparison("throughput_ratio_beside_reuse", bound=True, beside=2),
    Comparison("throughput_ratio_stages", True, 0, STAGES, (*SERVERS, IDLE), starts=4),
    Comparison("throughput_ratio_hosted", True, 0, HOSTED, starts=4),
)


class Batch(NamedTuple):
    """Prompts as token ids; only the time of the `requests` is taken."""

    requests: list[list[int]]
    beside: list[list[int]]


class Prompts:
    """Prompts that no prefix cache knows, and prompts of documents that both servers know."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._draw = random.Random(0)
        self.documents = [self._text(load.document_tokens) for _ in range(_KNOWN_DOCUMENTS)]

    def batch(self, beside: int) -> Batch:
        """The next one."""
        requests = [self._text(self._load.prompt_tokens) for _ in range(self._load.requests)]
        return Batch(requests, [self._known() for _ in range(beside)])

    def _known(self) -> list[int]:
        head, *documents = self._text(17), *self._draw.sample(self.documents, _KNOWN_DOCUMENTS)
        return [*head, *(token for document in documents for token in document), *self._text(15)]

    def _text(self, tokens: int) -> list[int]:
        return self._draw.choices(range(_FIRST_TEXT_TOKEN, shapes.VOCAB_SIZE), k=tokens)


def run(quick: bool, parts: Sequence[str] | None = None) -> harness.SuiteResult:
    """Compare the two servers (`quick`: less load, and without torch.compile)."""
    load = QUICK if quick else FULL
    rows: list[harness.Row] = []
    summary: dict[str, float | str] = {}
    wanted = [one for one in COMPARISONS if one.part in (parts or [USUAL])]
    try:
        for alike in _alike(wanted):
            found, taken = _measured(alike, load, quick)
            rows += found
            for name, seconds in taken.items():
                summary |= ratio(name, seconds)
                if IDLE in seconds:
                    summary |= ratio(f"{name}_{IDLE}", seconds, IDLE)
    except (ServerError, openai.OpenAIError) as error:
        raise harness.BenchError(str(error)) from error
    return {"rows": rows, "summary": summary}


def _alike(wanted: Sequence[Comparison]) -> list[list[Comparison]]:
    """Those that the same servers are asked for."""
    kinds = dict.fromkeys((one.bound, one.part) for one in wanted)
    return [[one for one in wanted if (one.bound, one.part) == kind] for kind in kinds]


def _measured(
    alike: Sequence[Comparison], load: Load, quick: bool
) -> tuple[list[harness.Row], dict[str, dict[str, list[float]]]]:
    """Rows of each start, and the seconds of each batch by comparison and server."""
    rows: list[harness.Row] = []
    of_all: dict[str, dict[str, list[float]]] = {}
    kind = alike[0]
    eager, starts = quick and kind.part != STAGES, 1 if quick else kind.starts
    load = load._replace(batches=-(-load.batches // starts))
    for _ in range(starts):
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(server_of(name, kind.bound, eager, kind.part))
                for name in kind.servers
            }
            for comparison in alike:
                seconds = asyncio.run(measure(servers, load, comparison))
                rows += _rows(load, comparison, seconds, servers, eager)
                of_this = of_all.setdefault(comparison.name, {name: [] for name in seconds})
                for name, values in seconds.items():
                    of_this[name] += values
    return rows, of_all


def ratio(
    name: str, seconds: Mapping[str, Sequence[float]], server: str = "segreuse"
) -> dict[str, float | str]:
    """The figure and its interval; the batches of a pair were measured right after each other."""
    pairs = zip(seconds["plain"], seconds[server], strict=True)
    ratios = [alone / other for alone, other in pairs]
    low, high = harness.median_interval(ratios)
    return {name: harness.median(ratios), f"{name}_low": low, f"{name}_high": high}


def server_of(name: str, bound: bool, eager: bool, part: str = USUAL) -> Server:
    """One of `SERVERS`, or `IDLE`; vLLM binds its threads to cores if `bound`.

    Raises:
        BenchError: `part` is `STAGES`, and there is one core.
    """
    args = ["--max-model-len", "4096", "--block-size", "32", "--dtype", "bfloat16"]
    args += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
    args += ["--enforce-eager"] if eager else []
    env = {} if bound else {"VLLM_CPU_OMP_THREADS_BIND": ""}
    if part == STAGES:
        args += ["--pipeline-parallel-size", "2"]
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, _two_cores()))
    if part == HOSTED:
        own = ["--kv-transfer-config", json.dumps(TRANSFER)]
        args += own if name == "plain" else ["--segreuse-config", str(PREFILL)]
        env |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,self,sm"}
    if name == IDLE:
        args += ["--kv-transfer-config", json.dumps(NOTHING)]
        paths = (str(harness.REPOSITORY), os.environ.get("PYTHONPATH"))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if name == "segreuse":
        return Server(_model(), args, env, command=SEGREUSE_COMMAND, start_timeout_s=_START_S)
    # A name that no plugin has: `Server` takes an empty value for one to be unset.
    env["VLLM_PLUGINS"] = "none"
    return Server(_model(), args, env, command=VLLM_COMMAND, start_timeout_s=_START_S)


def _two_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise harness.BenchError("two pipeline stages need two cores")
    return cores[:2]


def _model() -> Path:
    return shapes.make_model(SHAPE)


async def measure(
    servers: Mapping[str, Server], load: Load, comparison: Comparison
) -> dict[str, list[float]]:
    """Seconds of each batch, by server."""
    prompts, shorter = Prompts(load), load._replace(output_tokens=WAKING_TOKENS)
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    clients = {
        name: openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0)
        for name, server in servers.items()
    }
    for name, client in clients.items():
        model = servers[name].model_name
        for document in prompts.documents:
            await _complete(client, model, document, 1, _extra(name))
    for turn in harness.progress(range(load.batches + 2), comparison.name):
        waking, batch = prompts.batch(0), prompts.batch(comparison.beside)
        for name in harness.rotated([*servers], turn):
            client, model = clients[name], servers[name].model_name
            with ExitStack() as stack:
                for other in servers.keys() - {name}:
                    stack.enter_context(servers[other].halted())
                await _batch(client, model, name, shorter, waking)
                taken = await _batch(client, model, name, load, batch)
            if turn > 1:  # the first two batches warm up
                seconds[name].append(taken)
    for client in clients.values():
        await client.close()
    return seconds


async def _batch(
    client: openai.AsyncOpenAI, model: str, name: str, load: Load, batch: Batch
) -> float:
    """Seconds until the batch's own requests are answered."""
    beside = [
        asyncio.create_task(_complete(client, model, prompt, 1, _extra(name)))
        for prompt in batch.beside
    ]
    await asyncio.sleep(0)  # those go first
    began = time.perf_counter()
    await asyncio.gather(
        *(_complete(client, model, prompt, load.output_tokens, {}) for prompt in batch.requests)
    )
    taken = time.perf_counter() - began
    for answer in await asyncio.gather(*beside):
        report = (answer.model_extra or {}).get("kv_transfer_params") or {}
        reused = report.get("segreuse", {}).get("reused_tokens", 0)
        if (name == "segreuse") != (reused >= load.document_tokens):
            raise harness.BenchError(
                f"the prompts beside a batch reused {reused} tokens at the server {name!r}: "
                "the comparison would not be what it says"
            )
    return taken


def _extra(name: str) -> dict[str, Any]:
    return {"extra_keys": NAMESPACE} if name == "segreuse" else {}


async def _complete(
    client: openai.AsyncOpenAI, model: str, prompt: list[int], tokens: int, extra: dict[str, Any]
) -> Any:
    return await client.completions.create(
        model=model,
        prompt="",
        max_tokens=tokens,
        temperature=0.0,
        extra_body=with_tokens(prompt, {"ignore_eos": True, **extra}),
    )


def _rows(
    load: Load,
    comparison: Comparison,
    seconds: Mapping[str, Sequence[float]],
    servers: Mapping[str, Server],
    eager: bool,
) -> list[harness.Row]:
    return [
        {
            "comparison": comparison.name,
            "server": name,
            "shape": SHAPE,
            "execution": "eager" if eager else "compiled",
            "compute_cores": compute_cores(servers[name].log_text()),
            "requests_per_batch": load.requests,
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
            "known_prompts_beside": comparison.beside,
            "batches": len(values),
            "median_batch_ms": harness.median(values) * 1e3,
            "min_batch_ms": min(values) * 1e3,
            "tokens_per_s": load.batch_tokens / harness.median(values),
        }
        for name, values in seconds.items()
    ]


def compute_cores(log: str) -> int | None:
    """Cores that the worker computes on, as vLLM's log names them; None if it does not."""
    found = re.search(r"local_rank=0, core ids=\[([\d, ]+)\]", log)
    return len(found[1].split(",")) if found else None
