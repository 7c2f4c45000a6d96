# SPDX-License-Identifier: Apache-2.0
"""Engines in this very process, for measurements without HTTP and without a second process."""

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import BenchError
from bench.server import cpu_environment

BLOCK_TOKENS = 32
"""KV block size: the smallest that vLLM's CPU attention takes."""

_requests = itertools.count()


class Timed(NamedTuple):
    """One request: its time to the first token and what the connector reported about it."""

    ms: float
    token: int
    cached_tokens: int
    report: Mapping[str, Any] | None


def prepare_environment(kv_space_gib: int) -> None:
    """Set what vLLM reads from the environment; must run before vLLM is imported."""
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    for name, value in (cpu_environment(kv_space_gib) | quiet).items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def engine(model: Path, *, segreuse: bool | Mapping[str, Any], **options: Any) -> Iterator[Any]:
    """A `vllm.LLM`, with prefix caching unless `options` say otherwise, with or without segment
    reuse, gone after the block.

    Args:
        model: folder of the model.
        segreuse: whether segments are reused, or options for it.
        options: arguments of `LLM`.
    """
    from vllm import LLM

    from vllm_segreuse.compat import triton_dispatcher

    # numba may have been loaded into this process, by a suite or by an earlier engine.
    triton_dispatcher.install()
    if segreuse:
        from vllm_segreuse import kv_transfer_config

        given = {} if segreuse is True else dict(segreuse)
        options["kv_transfer_config"] = kv_transfer_config(**given)
    usual = {
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "disable_log_stats": True,
    }
    llm = LLM(model=str(model), **usual | options)
    try:
        yield llm
    finally:
        from vllm.distributed import cleanup_dist_env_and_memory

        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def first_token(
    llm: Any,
    prompt: list[int],
    extra_args: Mapping[str, Any] | None = None,
    salt: str | None = None,
) -> Timed:
    """Send one prompt of token ids, wait for one token."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, extra_args=dict(extra_args) if extra_args else None
    )
    tokens = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
    started = time.perf_counter()
    [output] = llm.generate([tokens], sampling, use_tqdm=False)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    report = (output.kv_transfer_params or {}).get("segreuse")
    return Timed(elapsed_ms, output.outputs[0].token_ids[0], output.num_cached_tokens, report)


class Request(NamedTuple):
    """What is asked: token ids, vLLM's `SamplingParams`, and its `cache_salt`."""

    prompt: list[int]
    sampling: Any
    salt: str | None = None


def generate(
    llm: Any, prompt: list[int], sampling: Any, salt: str | None = None
) -> tuple[Any, float]:
    """Run one request of token ids by itself.

    Returns:
        Its output, and the milliseconds until its first token.
    """
    [found] = generate_all(llm, [Request(prompt, sampling, salt)])
    return found


def generate_all(llm: Any, requests: Sequence[Request]) -> list[tuple[Any, float]]:
    """Run requests that decode together: a step reads the weights once for all of them.

    Each is sent when the one before it has its first token, so that its own comes as soon as if it
    was alone, up to the others' rows of a step.

    Returns:
        The output of each, and the milliseconds until its first token.
    """
    vllm_engine = llm.llm_engine
    outputs: dict[str, Any] = {}
    sent: dict[str, float] = {}
    first_ms: dict[str, float] = {}
    for prompt, sampling, salt in requests:
        name = f"bench-{next(_requests)}"
        tokens = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        sent[name] = time.perf_counter()
        vllm_engine.add_request(name, tokens, sampling)
        is_last = len(sent) == len(requests)
        while vllm_engine.has_unfinished_requests() and (is_last or name not in first_ms):
            for output in vllm_engine.step():
                outputs[output.request_id] = output
                if output.outputs[0].token_ids:
                    since = time.perf_counter() - sent[output.request_id]
                    first_ms.setdefault(output.request_id, since * 1e3)
    return [(outputs[name], first_ms[name]) for name in sent]


def require_reuse(timed: Timed, policy: str, at_least_tokens: int) -> Mapping[str, Any]:
    """The request's report, if it says that segments were reused as intended.

    Raises:
        BenchError: no report, another policy, or fewer than `at_least_tokens` tokens reused.
    """
    report = timed.report
    if report is None:
        raise BenchError(
            f"a request with extra keys carries no segreuse report (policy {policy}): "
            "the connector is not active in this engine"
        )
    if report["policy"] != policy or report["reused_tokens"] < at_least_tokens:
        raise BenchError(
            f"policy {policy} was to reuse at least {at_least_tokens} tokens, but the report says "
            f"{dict(report)}"
        )
    return report
