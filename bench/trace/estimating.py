# SPDX-License-Identifier: Apache-2.0
"""What `vllm-segreuse estimate` says of the prompts that servers get, and of the whole trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bench.harness import BenchError, progress
from bench.trace.slices import TracePrompt
from segreuse_tools.estimate.gain import GainSetting, Simulation, SizeRow
from segreuse_tools.estimate.prompts import PromptTokens, of_trace
from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.estimate.traces.reading import Trace
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.request import PolicyOptions

WHOLE_BLOCK_TOKENS = 16
"""Of the whole trace: vLLM's own on GPUs."""


def of_slice(
    prompts: Sequence[TracePrompt], policy: str, blocks: int, block_size: int, layers: int
) -> SizeRow:
    """Shares of the prompts in one cache, one prompt after the other.

    Args:
        policy: of the plugin.
        blocks: of the KV cache.
        block_size: tokens of each.
        layers: of the model.
    """
    simulation = Simulation(_setting((blocks * block_size,), block_size, (policy,), layers))
    for prompt in prompts:
        tokens = np.array(prompt.tokens, np.int32)
        simulation.run(PromptTokens(tokens, prompt.answer_tokens, None, [], parts=prompt.parts))
    [row] = simulation.rows()
    return row


def of_whole(
    path: Path, cache_tokens: tuple[int | None, ...], policies: tuple[str, ...]
) -> tuple[str, int, int, list[SizeRow]]:
    """Format, requests and prompt tokens of a trace, and its shares by size of the cache.

    Raises:
        BenchError: it is no trace of ids.
    """
    try:
        trace = Trace(path, LeftOut(strict=False))
        simulation = Simulation(_setting(cache_tokens, WHOLE_BLOCK_TOKENS, policies, 32))
        _run(simulation, progress(of_trace(trace), "trace, estimate"))
    except LogError as error:
        raise BenchError(str(error)) from error
    if not simulation.requests:
        raise BenchError(f"{path} holds nothing that can be replayed")
    return str(trace.format), simulation.requests, simulation.prompt_tokens, [*simulation.rows()]


def _run(simulation: Simulation, prompts: Iterable[PromptTokens]) -> None:
    for prompt in prompts:
        simulation.run(prompt)


def _setting(
    cache_tokens: tuple[int | None, ...], block_size: int, policies: tuple[str, ...], layers: int
) -> GainSetting:
    config = SegReuseConfig()
    options = {name: getattr(config, name) for name in PolicyOptions.model_fields}
    return GainSetting(
        cache_tokens=cache_tokens,
        block_size=block_size,
        policies=policies,
        layers=layers,
        engines=1,
        router="session",
        tier_tokens=0,
        max_depth=config.max_provenance_depth,
        options=PolicyOptions(**options),
    )
