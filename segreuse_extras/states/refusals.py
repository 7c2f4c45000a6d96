# SPDX-License-Identifier: Apache-2.0
"""What is not proven where states are composed, refused at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from segreuse_extras.states.again import POLICIES
from vllm_segreuse.engine.supported import WITHOUT, RefusedError, composes_states
from vllm_segreuse.options.server import ServerOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN_EARLY = True
"""The configuration tells all of it: a model need not be loaded, nor a tokenizer."""

_BY = "composed states of linear attention"


def check(vllm_config: VllmConfig, config: ServerOptions) -> None:
    """Refuse what contradicts them, where they were asked for
    (`--no-disable-hybrid-kv-cache-manager`); the rest is refused beside layers with a window, too
    (`segreuse_extras/windows/`).

    Raises:
        RefusedError: naming the first reason and the way out.
    """
    if not composes_states(vllm_config):
        return
    faults = _engine_faults(vllm_config)
    faults.append(
        (
            config.policy not in POLICIES,
            f"{_BY} are proven for the policies {' and '.join(POLICIES)} only, and policy="
            f"{config.policy}; write policy: focus into --segreuse-config",
        )
    )
    if reasons := [why for wrong, why in faults if wrong]:
        raise RefusedError(*reasons)


def _engine_faults(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative, tensor = (
        vllm_config.speculative_config,
        vllm_config.parallel_config.tensor_parallel_size,
    )
    return [
        (not current_platform.is_cpu(), f"{_BY} are proven on CPUs only{WITHOUT}"),
        (
            not model.enforce_eager,
            f"{_BY} are not proven for a compiled model; add --enforce-eager",
        ),
        (
            not cache.enable_prefix_caching,
            f"{_BY} need vLLM's prefix cache, which is off; add --enable-prefix-caching",
        ),
        (
            cache.enable_prefix_caching and cache.mamba_cache_mode == "all",
            f"{_BY} are proven with mamba_cache_mode=align only, and it is all; remove "
            "--mamba-cache-mode",
        ),
        # Of models that it knows vLLM makes it `align`.
        (
            cache.enable_prefix_caching and cache.mamba_cache_mode == "none",
            f"{_BY} need those that vLLM keeps for its prefix cache; it keeps none of "
            f"{model.architecture}, which it does not serve by code of its own{WITHOUT}",
        ),
        (
            cache.cache_dtype.startswith("fp8"),
            f"{_BY} are not proven beside an fp8 KV cache; use --kv-cache-dtype auto",
        ),
        (
            tensor > 1,
            f"{_BY} are not proven between tensor-parallel ranks; use --tensor-parallel-size 1",
        ),
        (
            speculative is not None,
            f"{_BY} are not proven beside speculative decoding; remove --speculative-config",
        ),
    ]


def check_budget(state_bytes: int, map_bytes: int) -> None:
    """Refuse to keep maps where not even one fits.

    Raises:
        RefusedError: with what one takes.
    """
    if state_bytes < map_bytes:
        raise RefusedError(
            f"state_bytes={state_bytes} holds nothing: what one segment changes of this model's "
            f"states takes {map_bytes} bytes; set state_bytes to some times as much"
        )
