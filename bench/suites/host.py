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
vLLM once. On a GPU a part is what the host does of it. HTTP is not in it; `overhead` measures that.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from bench import engine, harness, shapes
from bench.stopwatch import Stopwatch

SIZES = (4096, 16_384, 65_536)
ALL_NEW = 16_384
"""The longest prompt that is computed in full: attention is quadratic."""
DOCUMENTS, PREAMBLE_TOKENS, QUESTION_TOKENS = 4, 37, 64
ROUNDS, QUICK_ROUNDS = 15, 4
_NAMESPACE = ["bench-host"]
_FIRST_TEXT_TOKEN = 300
_KV_SPACE_GIB = 2

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
    for plugin in (False, True):
        with engine.engine(
            shapes.make_model("host"), segreuse=plugin, max_model_len=sizes[-1] + 256
        ) as llm:
            for size in sizes:
                rows += _measured(llm, plugin, size, rounds)
    return {"rows": rows, "summary": summary_of(rows)}


def _measured(llm: Any, plugin: bool, size: int, rounds: int) -> list[harness.Row]:
    prompts = _Prompts(size)
    if plugin:
        for document in prompts.documents:
            engine.first_token(llm, document, {"extra_keys": _NAMESPACE})
    arms = [arm for arm in (ARMS if plugin else ARMS[:2]) if arm != "plain" or size <= ALL_NEW]
    taken: dict[str, list[dict[str, float]]] = defaultdict(list)
    watch = Stopwatch()
    with watch.on({**PARTS, **(OURS if plugin else {})}):
        for turn in harness.progress(range(rounds + 1), f"host {size}"):
            for arm in harness.rotated(arms, turn):
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
                    taken[arm].append(parts | {"all": timed.ms})
    return [row for arm in arms for row in _rows(size, plugin, arm, taken[arm])]


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
        hit = ms[size, True, "hit", "all"]
        for arm in ("shift", "focus"):
            summary[f"{arm}_over_hit_{size}"] = ms[size, True, arm, "all"] / hit
        summary[f"hit_over_without_{size}"] = hit / ms[size, False, "hit", "all"]
        for plugin, name in ((False, "without"), (True, "with")):
            summary[f"detokenise_ms_{name}_{size}"] = ms[size, plugin, "hit", "detokenise"]
    return summary
