# SPDX-License-Identifier: Apache-2.0
"""The only place that assigns to vLLM's attributes: one file per upstream module.

    when                 what                                            in which process
    plugin registered    FLAGS: flags, and the check that finds out      every process of vLLM
                         whether reuse is enabled
    reuse enabled        FRONT_END: request checks, report in streams,   API server, batch runner,
                         lines of batch files,                           offline caller
                         routes of the kill switch, recent requests
    reuse enabled        ENGINE: calls into the scheduler, handle on     EngineCore, workers
                         the loaded model, hits counted as saved, what
                         workers report passed on in time, logits
                         for audits, memory for boundary states

"Enabled" is known when an engine's configuration is made, before any engine process starts. Forked
children inherit the patches; spawned ones find `_MARKER` in their environment. `block_pool`,
`kv_cache_manager` and `triton_dispatcher` have no place here: they come with the connector's
scheduler half. Nor has `attention_impl`, which replaces something for the time of a pass only.
"""

import importlib
import os

from vllm_segreuse.version import require_supported_vllm

FLAGS = ("envs", "engine_args")
FRONT_END = (
    *("input_processor", "renderer", "openai_streams", "openai_protocols"),
    *("async_llm", "api_server", "run_batch"),
)
ENGINE = (
    *("engine_core", "model_runner", "omp_processes", "prefix_cache_stats"),
    *("sampler", "scheduler", "worker"),
)

_MARKER = "VLLM_SEGREUSE_ENABLED"


def install_flags() -> None:
    """What every process of vLLM gets as soon as the plugin is installed."""
    _install(FLAGS)


def enable() -> None:
    """Installs everything: this process has made the configuration of an engine that reuses.

    Raises:
        UnsupportedVersionError: this vLLM is not a supported one.
        RuntimeError: something that has to be patched is missing.
    """
    require_supported_vllm()
    os.environ[_MARKER] = "1"
    _install(("envs", *FRONT_END, *ENGINE))  # envs again: the marker is a variable of ours


def enabled_by_parent() -> bool:
    """Whether the process that started this one has called `enable`."""
    return os.environ.get(_MARKER) == "1"


def install_engine() -> None:
    """What engine and worker processes need."""
    require_supported_vllm()
    _install(ENGINE)


def _install(modules: tuple[str, ...]) -> None:
    for name in modules:
        importlib.import_module(f"{__name__}.{name}").install()
