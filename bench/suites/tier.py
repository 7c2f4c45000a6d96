# SPDX-License-Identifier: Apache-2.0
"""The second tier: questions over a knowledge base that is five times larger than the KV memory.

`--part NAME` runs one of five parts (questions, throughput, soak, speed, quality):

- `questions`: time to the first token of the questions of `bench rag`, in four arms that take
  turns. `memory`: a server whose KV memory holds the whole base. `host`: KV memory for a fifth of
  it, the rest in host memory. `file`: the same, with host memory for a fifth, too, and files for
  all. `recompute`: the server of the arm `host`, requests that name no key, with a `cache_salt` of
  their own.
  Then the server of the arm `file` is stopped and started. How many tokens are prefilled until it
  says that all documents can be reused, and how many of the passages' tokens the first question
  computes?
- `throughput`: requests without keys, on a server with the tier against one without, as `bench
  overhead` measures it.
- `soak`: the load of `bench soak`, with a tier of few rows. What a plan reads from a row is
  compared with what was stored there, and nothing may be left when it is over.
- `speed.measure`: codecs beside a plain copy, as `bench codecs` does it.
- `quality.measure`: what codecs change in the distribution of the first token, as `bench codecs
  --model` measures it, here on the lab's model, which is at hand everywhere. It was not trained on
  such text: what a codec costs a pretrained model, only `bench codecs --model DIR` says.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench import codecs, harness, shapes
from bench.codecs import speed
from bench.server import Server, ServerError
from bench.suites import overhead, rag
from bench.suites.tier_soak import soak
from examples.rag import library
from examples.rag.chat import Answer, ask
from segreuse_tools.knowledge.client import TOKEN_ENV, ClientError, KnowledgeClient

BLOCK_TOKENS = 32
PRESSURE = 5
"""How much larger the base is than the KV memory."""

ARMS = ("memory", "host", "file", "recompute")
_START_S = 1200


class Load(NamedTuple):
    """How much is asked, of which model."""

    shape: str
    eager: bool
    max_model_len: str
    questions: int
    orders: int
    longest_document_chars: int
    overhead: overhead.Load
    soak_requests: int
    codec_samples: int


FULL = Load("bench28", False, "8192", 50, 2, 1 << 30, overhead.FULL, 10_000, 8)
QUICK = Load("bench8", True, "5120", 12, 1, 8_000, overhead.QUICK, 400, 1)


class Sizes(NamedTuple):
    """Bytes and blocks that the arms are given.

    Attributes:
        base_blocks: that the documents take.
        block_bytes: of one block, all layers.
    """

    base_blocks: int
    block_bytes: int

    @property
    def small_blocks(self) -> int:
        """KV memory of a fifth of the base, and vLLM's null block."""
        return self.base_blocks // PRESSURE + 1

    @property
    def all_gib(self) -> float:
        """The base, and what questions leave beside it."""
        return 2 * self.base_blocks * self.block_bytes / (1 << 30)

    @property
    def small_gib(self) -> float:
        """Host memory of a fifth of the base."""
        return self.base_blocks // PRESSURE * self.block_bytes / (1 << 30)


PARTS = ("questions", "throughput", "soak", "speed", "quality")


def run(quick: bool, parts: Sequence[str] = ()) -> harness.SuiteResult:
    """The parts named, or all (`quick`: less of everything, on fewer layers)."""
    import openai

    rows: list[harness.Row] = []
    summary: dict[str, Any] = {}
    interrupted = False
    measures = measures_of(quick)
    try:
        for part in parts or PARTS:
            found = measures[part]()
            rows += found["rows"]
            summary |= found["summary"]
            if interrupted := found.get("interrupted", False):
                break
    except (ServerError, ClientError, openai.OpenAIError) as error:
        raise harness.BenchError(str(error)) from error
    return {"rows": rows, "summary": summary, "interrupted": interrupted}


def measures_of(quick: bool) -> dict[str, Callable[[], harness.SuiteResult]]:
    """How each of `PARTS` is measured."""
    load = QUICK if quick else FULL
    return {
        "questions": partial(questions_and_restart, load),
        "throughput": partial(throughput, load),
        "soak": partial(soak, load.soak_requests),
        "speed": partial(speed.measure, quick),
        "quality": partial(codec_quality, load.codec_samples),
    }


def codec_quality(samples: int) -> harness.SuiteResult:
    """So many examples of each task, by the lab's model."""
    from bench.codecs import quality  # it loads vLLM
    from bench.quality import engine as quality_engine

    return quality.measure(quality_engine.MODEL, codecs.USUAL, samples)


# Questions.


def questions_and_restart(load: Load) -> harness.SuiteResult:
    """All arms, then the server of `file` once more, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return _questions_and_restart(load, Path(folder))


def _questions_and_restart(load: Load, folder: Path) -> harness.SuiteResult:
    topics = library.python_topics().items()
    documents = {id_: text for id_, text in topics if len(text) <= load.longest_document_chars}
    model = shapes.make_model(load.shape)
    sizes = _sizes(model, documents)
    prompts = rag.prompts_of(model, documents, library.questions()[: load.questions] * load.orders)
    token = secrets.token_hex()
    server = partial(_server, model, load, sizes, folder, token)
    with ExitStack() as stack:
        servers = {arm: stack.enter_context(server(arm)) for arm in ARMS if arm != "recompute"}
        for started in servers.values():
            rag.ingest(started.url, token, documents)
        servers["recompute"] = servers["host"]
        answers = _ask_all(servers, prompts)
    rows = [_row(load, arm, sizes, answers[arm]) for arm in ARMS]
    p50 = {arm: [answer.ttft_s for answer in answers[arm]] for arm in ARMS}
    summary: dict[str, Any] = {}
    for key, arm, other in (
        ("host_over_memory", "host", "memory"),
        ("host_over_recompute", "host", "recompute"),
        ("file_over_memory", "file", "memory"),
        ("file_over_recompute", "file", "recompute"),
    ):
        summary[key] = harness.median(p50[arm]) / harness.median(p50[other])
    summary |= {f"{arm}_reused_share": _reused_share(answers[arm], prompts) for arm in ARMS[:3]}
    with server("file") as again:
        summary |= _after_restart(again, token, len(documents), prompts[0])
    return {"rows": rows, "summary": summary | {"questions": len(prompts)}}


def _sizes(model: Path, documents: Mapping[str, str]) -> Sizes:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    blocks = [-(-len(tokenizer.encode(text).ids) // BLOCK_TOKENS) for text in documents.values()]
    config = json.loads((model / "config.json").read_text())
    kv_heads, channels = config["num_key_value_heads"], config["head_dim"]
    token_bytes = 2 * config["num_hidden_layers"] * kv_heads * channels * 2
    return Sizes(sum(blocks), BLOCK_TOKENS * token_bytes)


def _server(model: Path, load: Load, sizes: Sizes, folder: Path, token: str, arm: str) -> Server:
    import yaml

    options = yaml.safe_load(rag.CONFIG.read_text()) | {"knowledge_path": None}
    args = [
        "--max-model-len",
        load.max_model_len,
        "--block-size",
        str(BLOCK_TOKENS),
        "--dtype",
        "bfloat16",
    ]
    args += ["--enforce-eager"] if load.eager else []
    if arm == "host":
        options["tier"] = {"host_gib": sizes.all_gib}
    elif arm == "file":
        options["knowledge_path"] = str(folder / "knowledge.sqlite")
        options["tier"] = {
            "host_gib": sizes.small_gib,
            "path": str(folder / "tier"),
            "disk_gib": sizes.all_gib,
        }
    if arm != "memory":
        args += ["--num-gpu-blocks-override", str(sizes.small_blocks)]
    file = folder / f"{arm}.yaml"
    file.write_text(yaml.safe_dump(options))
    env = {TOKEN_ENV: token, "VLLM_CPU_KVCACHE_SPACE": "2"}
    return Server(model, [*args, "--segreuse-config", str(file)], env, start_timeout_s=_START_S)


def _ask_all(
    servers: Mapping[str, Server], prompts: Sequence[rag.Prompt]
) -> dict[str, list[Answer]]:
    """All prompts to all arms, `rag.TURN` at a time; answers in the order of the prompts."""
    ask_arm = {
        arm: partial(_ask, server.client(timeout=600), server.model_name, arm)
        for arm, server in servers.items()
    }
    answers: dict[str, list[Answer]] = {arm: [] for arm in ARMS}
    with ThreadPoolExecutor(rag.CONCURRENCY) as pool:
        for arm in ARMS:
            list(pool.map(ask_arm[arm], [rag.first_half(p) for p in prompts[: rag.CONCURRENCY]]))
        turns = range(0, len(prompts), rag.TURN)
        for turn, at in enumerate(harness.progress(turns, "tier")):
            for arm in harness.rotated(ARMS, turn):
                answers[arm] += pool.map(ask_arm[arm], prompts[at : at + rag.TURN])
    return answers


def _ask(client: Any, model: str, arm: str, prompt: rag.Prompt) -> Answer:
    extra = rag.ARMS["plain" if arm == "recompute" else "reuse"]
    return ask(client, model, prompt.messages, max_tokens=rag.MAX_TOKENS, extra_body=extra)


def _row(load: Load, arm: str, sizes: Sizes, answers: Sequence[Answer]) -> harness.Row:
    times_ms = [answer.ttft_s * 1e3 for answer in answers]
    reports = [answer.report or {} for answer in answers]
    return {
        "part": "questions",
        "shape": load.shape,
        "arm": arm,
        "execution": "eager" if load.eager else "compiled",
        "base_blocks": sizes.base_blocks,
        "questions": len(answers),
        "concurrency": rag.CONCURRENCY,
        "reused": sum(report.get("reused_tokens", 0) for report in reports),
        "tiered": sum(report.get("tiered_tokens", 0) for report in reports),
        "recomputed": sum(report.get("recomputed_tokens", 0) for report in reports),
        "ttft_p50_ms": harness.median(times_ms),
        "ttft_p99_ms": rag.p99(times_ms),
    }


def _reused_share(answers: Sequence[Answer], prompts: Sequence[rag.Prompt]) -> float:
    reused = sum(
        min((answer.report or {}).get("reused_tokens", 0), prompt.passage_tokens)
        for answer, prompt in zip(answers, prompts, strict=True)
    )
    return reused / sum(prompt.passage_tokens for prompt in prompts)


# Restart.


def _after_restart(
    server: Server, token: str, documents: int, prompt: rag.Prompt
) -> dict[str, float]:
    """What a server that was started again computes of the documents."""
    with KnowledgeClient(server.url, token) as client:
        for state in client.watch(rag.BASE):
            if not state.documents.warming:
                break
        if state.documents.cold or state.documents.failed:
            raise harness.BenchError(f"of {documents} documents there are {state.documents}")
    prefilled = prompt_tokens(server.read("/metrics"))
    answer = _ask(server.client(timeout=600), server.model_name, "file", prompt)
    reused = min((answer.report or {}).get("reused_tokens", 0), prompt.passage_tokens)
    return {
        "restart_prefilled_tokens": prefilled,
        "restart_first_question_computed_tokens": prompt.passage_tokens - reused,
        "restart_first_ttft_ms": answer.ttft_s * 1e3,
    }


def prompt_tokens(metrics: str) -> float:
    """Prompt tokens that vLLM has counted, of the text of `/metrics`."""
    return sum(map(float, re.findall(r"^vllm:prompt_tokens_total\S* (\S+)$", metrics, re.M)))


# Throughput.


def throughput(load: Load) -> harness.SuiteResult:
    """Requests without keys, beside a tier that stores what others leave."""
    comparison = overhead.Comparison("throughput_ratio", bound=True, beside=0)
    with _pair(load) as servers:
        seconds = asyncio.run(overhead.measure(servers, load.overhead, comparison))
    summary = overhead.ratio("throughput_ratio", seconds)
    rows = [
        {
            "part": "throughput",
            "server": {"plain": "without tier", "segreuse": "with tier"}[name],
            "batches": len(values),
            "median_batch_ms": harness.median(values) * 1e3,
        }
        for name, values in seconds.items()
    ]
    return {"rows": rows, "summary": summary}


@contextmanager
def _pair(load: Load) -> Iterator[dict[str, Server]]:
    """Two servers with the plugin, by the names that `overhead` gives them."""
    args = ["--max-model-len", "4096", "--block-size", str(BLOCK_TOKENS), "--dtype", "bfloat16"]
    args += ["--no-enable-log-requests", "--disable-uvicorn-access-log"]
    args += ["--enforce-eager"] if load.eager else []
    model = shapes.make_model(overhead.SHAPE)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        servers = {}
        for name, options in (("plain", {}), ("segreuse", {"tier": {"host_gib": 1.0}})):
            file = Path(folder) / f"{name}.yaml"
            file.write_text(json.dumps(options))
            more = ["--segreuse-config", str(file)]
            server = Server(model, [*args, *more], start_timeout_s=_START_S)
            servers[name] = stack.enter_context(server)
        yield servers
