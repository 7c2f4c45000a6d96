# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in this process, small and quick to start."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bench.shapes import SHAPES, make_model
from tests.parts import parts_of
from tests.reports import Whole

if TYPE_CHECKING:
    from segreuse_tools.doctor.diagnosis import Diagnosis

NAMESPACE = {"extra_keys": ["tests"]}
BF16_NOISE = 0.0625 + 0.004
"""How far log-probabilities in bf16 may be apart: two steps of a logit between 4 and 8, and the
change of the sum over the vocabulary that comes with them."""
BLOCK_SIZE = 32
ENVIRONMENT = {"gpt_oss": {"VLLM_CPU_ATTN_SPLIT_KV": "0"}}
"""Of shapes that are refused otherwise (`check_split_keys`)."""


@dataclass
class Answer:
    """One request's outcome: tokens, the top log-probabilities of each, the report."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.report = Whole(self.report)


def apart(mine: Answer, theirs: Answer) -> float:
    """Largest difference of log-probabilities, as far as both answer the same text."""
    worst = 0.0
    for ours, others, got, wanted in zip(
        mine.logprobs, theirs.logprobs, mine.token_ids, theirs.token_ids, strict=True
    ):
        common = ours.keys() & others.keys()
        worst = max([worst, *(abs(ours[token] - others[token]) for token in common)])
        if got != wanted:
            break
    return worst


def diagnosed(shape: str, dtype: str = "bfloat16") -> Diagnosis:
    """The doctor's verdict on a test model, with the engine's arguments."""
    from vllm.engine.arg_utils import EngineArgs

    from segreuse_tools.doctor.diagnosis import diagnose
    from vllm_segreuse.config import SegReuseConfig

    args = EngineArgs(
        model=str(make_model(shape)), dtype=dtype, block_size=BLOCK_SIZE, max_model_len=4096
    )
    with patch.dict(os.environ, ENVIRONMENT.get(shape, {})):
        return diagnose(args, SegReuseConfig())


class Engine:
    """`LLM` with what the tests need around it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.vocab_size: int = llm.llm_engine.model_config.get_vocab_size()

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, with its pool and our connector."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def pool(self) -> Any:
        """The block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def index(self) -> Any:
        """The segment index; None in a plain engine."""
        connector = self.scheduler.connector
        return None if connector is None else parts_of(connector.scheduler_side).index

    def ask(
        self,
        *prompts: list[int] | dict[str, Any],
        options: dict[str, Any] | list[dict[str, Any] | None] | None = None,
        adapters: list[Any] | None = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Run prompts (token ids, or what vLLM takes instead) together; `options` are the
        `extra_args` of all requests or of each, `adapters` the LoRA adapter of each."""
        from vllm import SamplingParams

        sampling = {"max_tokens": 4, "temperature": 0.0, "logprobs": 8} | sampling
        each = options if isinstance(options, list) else [options] * len(prompts)
        params = [SamplingParams(extra_args=extra, **sampling) for extra in each]
        inputs: Any = [
            prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
            for prompt in prompts
        ]
        outputs = self.llm.generate(inputs, params, use_tqdm=False, lora_request=adapters)
        return [_answer(output) for output in outputs]

    def children(
        self, prompt: list[int], options: dict[str, Any] | None = None, **sampling: Any
    ) -> list[Answer]:
        """All answers to one prompt, where `n` of them are asked for."""
        from vllm import SamplingParams

        params = SamplingParams(extra_args=options, **{"logprobs": 8} | sampling)
        [output] = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return [_answer(output, number) for number in range(len(output.outputs))]

    def reset(self) -> None:
        """Forget everything cached."""
        assert self.llm.reset_prefix_cache()

    def check_index(self) -> None:
        """The segment index is consistent."""
        # Imported here: it loads numba, which must not be there before the engine.
        from bench.integrity import check_integrity

        check_integrity(self.index)

    def check_idle(self) -> None:
        """No block may be held once nothing runs; the index names cached blocks only."""
        pool = self.pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"
        assert all(b.ref_cnt == 0 for b in pool.blocks if not b.is_null)
        if self.index is not None:
            self.check_index()
            assert all(b.block_hash is not None for b in pool.blocks if b.block_id in self.index)


def _answer(output: Any, number: int = 0) -> Answer:
    one = output.outputs[number]
    logprobs = [{t: p.logprob for t, p in step.items()} for step in one.logprobs or []]
    report = (output.kv_transfer_params or {}).get("segreuse", {})
    return Answer(list(one.token_ids), logprobs, output.num_cached_tokens, report)


@contextmanager
def _loaded_modules_frozen() -> Iterator[None]:
    """Keep what is loaded by now out of garbage collection.

    vLLM collects nine times while an engine starts and ends, and first unfreezes everything. With
    torch and vLLM loaded (a million objects) that took half of the time of a small engine.
    """
    gc.collect()
    gc.freeze()
    with patch.object(gc, "freeze"), patch.object(gc, "unfreeze"):
        yield


@contextmanager
def _kernels_looked_for_once() -> Iterator[None]:
    """Leave out vLLM's search of all loaded modules for Triton kernels, but for the first engine.

    What was found is replaced where it is defined, so modules that come later have it, too. The
    search looks at half a million names, which took a third of the start of a small engine.
    """
    from vllm.triton_utils import dispatcher

    with patch.object(dispatcher, "_rebind_kernels") if dispatcher._registry else nullcontext():
        yield


@contextmanager
def quick_start() -> Iterator[None]:
    """For engines of tests, from before they start until they have ended."""
    with _loaded_modules_frozen(), _kernels_looked_for_once():
        yield


@contextmanager
def engine(
    shape: str, segreuse: dict[str, Any] | bool = True, **arguments: Any
) -> Iterator[Engine]:
    """Start an engine on a test model.

    Args:
        segreuse: options of segment reuse, True for none, False for plain vLLM. Requests that
            arrive together share a pass, unless the options say otherwise.
    """
    environment = dict(os.environ)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would count instead of the argument below
    os.environ |= ENVIRONMENT.get(shape, {})
    import torch
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    import vllm_segreuse
    from vllm_segreuse.compat import triton_dispatcher

    triton_dispatcher.install()  # other tests have loaded numba into this process
    if segreuse is not False:
        options = {"max_step_tokens": 4096} | ({} if segreuse is True else segreuse)
        arguments["kv_transfer_config"] = vllm_segreuse.kv_transfer_config(**options)
    arguments = (
        {
            "model": str(make_model(shape)),
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": 64 << 20,
            "enforce_eager": True,
            "seed": 0,
        }
        | SHAPES[shape].arguments
        | arguments
    )
    if torch.cuda.is_available():  # several such engines share a GPU
        arguments.setdefault("gpu_memory_utilization", 0.05)
    if backend := os.environ.get("SEGREUSE_TEST_BACKEND"):  # on a GPU, each of its backends
        arguments.setdefault("attention_backend", backend)
    if os.environ.get("SEGREUSE_TEST_GRAPHS"):  # on a GPU, as servers run
        arguments["enforce_eager"] = False
    if tiles := os.environ.get("SEGREUSE_TEST_COMMON_TILES"):  # on a GPU, for short prompts, too
        from vllm_segreuse.kernels import triton_schedule

        triton_schedule.COMMON_TILES = int(tiles)
    started = None
    try:
        with quick_start():
            try:
                started = Engine(LLM(**arguments))
                yield started
            finally:
                if started is not None:
                    started.llm.llm_engine.engine_core.shutdown()
                    del started.llm  # or whoever still has `started` would keep all of it
                # An engine that was refused has no shutdown of its own.
                ensure_kv_transfer_shutdown()
                cleanup_dist_env_and_memory()  # collects garbage, too
    finally:
        # Servers that later tests start would inherit what this engine has set.
        for name in (
            "VLLM_ENABLE_V1_MULTIPROCESSING",
            "VLLM_CPU_KVCACHE_SPACE",
            "VLLM_DIST_IDENT",
            "VLLM_CPU_ATTN_SPLIT_KV",
        ):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]


class Prompts:
    """Seeded prompts made of the same documents."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        """`count` random tokens, none of them special."""
        return [self._random.randrange(16, self._vocab_size) for _ in range(count)]

    def around(self, *documents: list[int], gaps: tuple[int, ...] = (37, 11, 5, 23)) -> list[int]:
        """New text, then each document followed by new text; offsets are odd on purpose."""
        prompt = self.tokens(gaps[0])
        for i, document in enumerate(documents):
            prompt += document + self.tokens(gaps[(i + 1) % len(gaps)])
        return prompt
