# SPDX-License-Identifier: Apache-2.0
"""What a first token costs beside the model, by part.

A model that costs next to nothing (two layers of 64 channels) is asked prompts of 4,096, 16,384 and
65,536 tokens in this process, one token each:

- `plain`: new to everybody, without extra keys; not the longest.
- `hit`: all but a question of 64 tokens is in vLLM's prefix cache.
- `shift`, `focus`: so is most of it, but elsewhere: four documents in another order, with 37 new
  tokens in front, and some behind the first one. With extra keys.

Functions are wrapped (`bench/stopwatch.py`), each part counts what no other one does, and `else` is
the rest of the time to the first token. Arms take turns; figures are medians. An engine without the
plugin (`plugin: false`) is asked `plain` and `hit`, too, before the other one: one process patches
vLLM once. On a GPU a part is what the host does of it.

Two parts are timed by themselves, since an engine in this process has neither: `tokenise`, of the
text of `plain`, and `pickle`, of what the connector sends to workers in other processes, there and
back. The same arms are then asked of servers over HTTP (`over HTTP`: all of a first token).
"""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import httpx
import openai

from bench import engine, harness, shapes
from bench.agents.completions import Completions
from bench.server import SEGREUSE_COMMAND, VLLM_COMMAND, Server, ServerError
from bench.stopwatch import Stopwatch

SIZES = (4096, 16_384, 65_536)
ALL_NEW = 16_384
"""The longest prompt that is computed in full: attention is quadratic."""
DOCUMENTS, PREAMBLE_TOKENS, QUESTION_TOKENS = 4, 37, 64
ROUNDS, QUICK_ROUNDS = 15, 4
_NAMESPACE = ["bench-host"]
_FIRST_TEXT_TOKEN = 300
_KV_SPACE_GIB = 2
_FLAGS = (
    *("--block-size", str(engine.BLOCK_TOKENS), "--dtype", "bfloat16", "--enforce-eager"),
    *("--no-enable-log-requests", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details"),
)

_VLLM = "vllm.v1."
PARTS: Mapping[str, str] = {
    _VLLM + "engine.llm_engine:LLMEngine.add_request": "front end",
    _VLLM + "request:Request.update_block_hashes": "hash blocks",
    _VLLM + "core.sched.scheduler:Scheduler.schedule": "schedule",
    _VLLM + "core.kv_cache_manager:KVCacheManager.get_computed_blocks": "look up prefix",
    _VLLM + "core.kv_cache_manager:KVCacheManager.allocate_slots": "allocate",
    _VLLM + "worker.gpu_model_runner:GPUModelRunner.execute_model": "model runner",
    _VLLM + "worker.gpu_model_runner:GPUModelRunner._model_forward": "forward",
    _VLLM + "worker.gpu_model_runner:GPUModelRunner.sample_tokens": "sample",
    _VLLM + "core.sched.scheduler:Scheduler.update_from_output": "update",
    _VLLM + "engine.output_processor:OutputProcessor.process_outputs": "output",
    _VLLM + "engine.detokenizer:BaseIncrementalDetokenizer.update": "detokenise",
}
"""vLLM's own."""

OURS: Mapping[str, str] = {
    "vllm_segreuse.scheduling.scheduler:SchedulerSide.add": "arrive",
    "vllm_segreuse.scheduling.scheduler:SchedulerSide.match": "plan",
    "vllm_segreuse.cache.finder:ContentFinder.find": "match",
    "vllm_segreuse.scheduling.scheduler:SchedulerSide.allocated": "report",
    "vllm_segreuse.scheduling.scheduler:SchedulerSide.finished": "report",
    "vllm_segreuse.connector:SegReuseConnector.build_connector_meta": "message",
    "vllm_segreuse.prefill.executor:SparsePrefill.prepare": "prepare and move",
    "vllm_segreuse.prefill.worker:WorkerSide.before_forward": "pass",
}
"""Parts of the plugin."""

ARMS = ("plain", "hit", "shift", "focus")


def run(quick: bool) -> harness.SuiteResult:
    """Measure all sizes with and without the plugin; `quick`: the two smaller ones, fewer times."""
    engine.prepare_environment(_KV_SPACE_GIB)
    sizes, rounds = (SIZES[:2], QUICK_ROUNDS) if quick else (SIZES, ROUNDS)
    rows: list[harness.Row] = []
    model, longest = shapes.make_model("host"), sizes[-1] + 256
    for plugin in (False, True):
        with engine.engine(model, segreuse=plugin, max_model_len=longest) as llm:
            for size in sizes:
                rows += _measured(llm, plugin, size, rounds)
    try:
        for plugin in (False, True):
            command = SEGREUSE_COMMAND if plugin else VLLM_COMMAND
            flags = [*_FLAGS, "--max-model-len", str(longest)]
            env = {"VLLM_CPU_KVCACHE_SPACE": str(_KV_SPACE_GIB)}
            with Server(model, flags, env, command=command) as server:
                for size in sizes:
                    rows += _over_http(Completions(server, longest), plugin, size, rounds)
    except (ServerError, openai.OpenAIError, httpx.HTTPError) as error:
        raise harness.BenchError(str(error)) from error
    return {"rows": rows, "summary": summary_of(rows)}


def _measured(llm: Any, plugin: bool, size: int, rounds: int) -> list[harness.Row]:
    prompts = _Prompts(size)
    if plugin:
        for document in prompts.documents:
            engine.first_token(llm, document, {"extra_keys": _NAMESPACE})
    taken: dict[str, list[dict[str, float]]] = defaultdict(list)
    watch, sent = Stopwatch(), _Messages()
    tokenizer = llm.get_tokenizer()
    noted = sent.noted() if plugin else nullcontext()
    with watch.on({**PARTS, **(OURS if plugin else {})}), noted:
        for turn, arm in _turns(plugin, size, rounds):
            prompt, extra_args = prompts.of(arm)
            if arm == "hit":  # now, so that nothing has evicted it
                engine.first_token(llm, prompt[:-QUESTION_TOKENS])
            watch.take()
            timed = engine.first_token(llm, prompt, extra_args)
            parts = {part: seconds * 1e3 for part, seconds in watch.take().items()}
            if extra_args:
                engine.require_reuse(timed, arm, DOCUMENTS * prompts.document_tokens)
            if turn > 0:  # the first round warms up
                parts["else"] = timed.ms - sum(parts.values())
                if arm == "plain":
                    text = tokenizer.decode(prompt)
                    parts["tokenise"] = _ms(functools.partial(tokenizer.encode, text))
                if plugin:
                    parts["pickle"] = _ms(sent.there_and_back)
                taken[arm].append(parts | {"all": timed.ms})
    return [row for arm in taken for row in _rows(size, plugin, arm, taken[arm])]


def _over_http(client: Completions, plugin: bool, size: int, rounds: int) -> list[harness.Row]:
    prompts = _Prompts(size)
    if plugin:
        for document in prompts.documents:
            client.ask(document, {"extra_keys": _NAMESPACE}, 1)
    taken: dict[str, list[float]] = defaultdict(list)
    for turn, arm in _turns(plugin, size, rounds):
        prompt, extra_args = prompts.of(arm)
        if arm == "hit":
            client.ask(prompt[:-QUESTION_TOKENS], {}, 1)
        body = {}
        if extra_args:
            body = {"extra_keys": _NAMESPACE, "vllm_xargs": {"segreuse_policy": arm}}
        found = client.ask(prompt, body, 1)
        if extra_args and found.tokens.equal < DOCUMENTS * prompts.document_tokens:
            raise harness.BenchError(f"{arm} reused {found.tokens.equal} tokens only")
        if turn > 0:
            taken[arm].append(found.ttft_s * 1e3)
    same = {"tokens": size, "plugin": plugin, "part": "over HTTP"}
    return [same | {"arm": arm, "ms": statistics.median(ms)} for arm, ms in taken.items()]


def _turns(plugin: bool, size: int, rounds: int) -> Iterator[tuple[int, str]]:
    """Arms of each round, and one round more in front, each of them first in turn."""
    arms = [arm for arm in (ARMS if plugin else ARMS[:2]) if arm != "plain" or size <= ALL_NEW]
    for turn in harness.progress(range(rounds + 1), f"host {size}"):
        for arm in harness.rotated(arms, turn):
            yield turn, arm


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


class _Messages:
    """What the connector sends to the workers with a step."""

    def __init__(self) -> None:
        self._last: Any = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Meanwhile the last one with which a request leaves is kept."""
        from vllm_segreuse.connector import SegReuseConnector

        build: Callable[[Any, Any], Any] = SegReuseConnector.build_connector_meta

        def noting(connector: Any, output: Any) -> Any:
            message = build(connector, output)
            if output.scheduled_new_reqs:
                self._last = message
            return message

        with mock.patch.object(SegReuseConnector, "build_connector_meta", noting):
            yield

    def there_and_back(self) -> Any:
        """As a queue between processes does."""
        return pickle.loads(pickle.dumps(self._last, pickle.HIGHEST_PROTOCOL))


class _Prompts:
    """Documents that stay, in whole blocks, and prompts that never come twice.

    Args:
        size: tokens of a prompt.
    """

    def __init__(self, size: int) -> None:
        self._random = random.Random(size)
        each = (size - PREAMBLE_TOKENS - QUESTION_TOKENS) // DOCUMENTS
        self.document_tokens = each // engine.BLOCK_TOKENS * engine.BLOCK_TOKENS
        self._rest = size - PREAMBLE_TOKENS - DOCUMENTS * self.document_tokens - QUESTION_TOKENS
        self.documents = [self._fresh(self.document_tokens) for _ in range(DOCUMENTS)]
        self._orders = itertools.cycle(list(itertools.permutations(range(DOCUMENTS)))[1:])
        self._cached = self._fresh(size - QUESTION_TOKENS)
        self._size = size

    def of(self, arm: str) -> tuple[list[int], dict[str, Any] | None]:
        """A prompt, and what the request carries."""
        if arm == "plain":
            return self._fresh(self._size), None
        if arm == "hit":
            return [*self._cached, *self._fresh(QUESTION_TOKENS)], None
        first, *others = (self.documents[index] for index in next(self._orders))
        body = [*first, *self._fresh(self._rest), *(token for it in others for token in it)]
        prompt = [*self._fresh(PREAMBLE_TOKENS), *body, *self._fresh(QUESTION_TOKENS)]
        return prompt, {"extra_keys": _NAMESPACE, "segreuse_policy": arm}

    def _fresh(self, count: int) -> list[int]:
        return self._random.choices(range(_FIRST_TEXT_TOKEN, shapes.VOCAB_SIZE), k=count)


def _rows(size: int, plugin: bool, arm: str, taken: list[dict[str, float]]) -> list[harness.Row]:
    """Medians in milliseconds, the longest part first; `all` and `else` at the end."""
    parts = {part for one in taken for part in one}
    medians = {part: statistics.median(one.get(part, 0.0) for one in taken) for part in parts}
    last = ("else", "all")
    ordered = sorted(parts - {*last}, key=lambda part: -medians[part])
    return [
        {"tokens": size, "plugin": plugin, "arm": arm, "part": part, "ms": medians[part]}
        for part in (*ordered, *last)
    ]


def summary_of(rows: list[harness.Row]) -> dict[str, float]:
    """Ratios of whole times, and what the detokenizer takes of a prefix hit."""
    ms = {(row["tokens"], row["plugin"], row["arm"], row["part"]): row["ms"] for row in rows}
    summary = {}
    for size in sorted({size for size, *_ in ms}):
        for part, suffix in (("all", ""), ("over HTTP", "_http")):
            hit = ms[size, True, "hit", part]
            for arm in ("shift", "focus"):
                summary[f"{arm}_over_hit{suffix}_{size}"] = ms[size, True, arm, part] / hit
            summary[f"hit_over_without{suffix}_{size}"] = hit / ms[size, False, "hit", part]
        for plugin, name in ((False, "without"), (True, "with")):
            summary[f"detokenise_ms_{name}_{size}"] = ms[size, plugin, "hit", "detokenise"]
    return summary
