# SPDX-License-Identifier: Apache-2.0
"""Entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes.

    when                 what                                            in which process
    plugin registered    flags, and the check that finds out             every process of vLLM
                         whether reuse is enabled
    reuse enabled        the front end: request checks, report in        API server, batch runner,
                         streams, lines of batch files, routes,          offline caller
                         recent requests
    reuse enabled        the engine: calls into the scheduler, handle    EngineCore, workers
                         on the loaded model, hits counted as saved,
                         what workers report passed on in time, logits
                         for audits, memory for what lies beside KV

"Enabled" is known when an engine's configuration is made, before any engine process starts. Forked
children inherit the patches; spawned ones find `_MARKER` in their environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_segreuse.compat.engine_args import Check

_MARKER = "VLLM_SEGREUSE_ENABLED"


def register() -> None:
    """Make the `--segreuse` flags known and, in children of an enabled engine, patch the engine.

    May be called any number of times. In a process whose engine does not use segment reuse nothing
    else of vLLM changes.

    Raises:
        RuntimeError: something that has to be patched is not where this vLLM should have it.
    """
    from vllm_segreuse.compat import engine_args, envs
    from vllm_segreuse.config.launch import add_flags, resolve_flags

    envs.install()
    engine_args.install(engine_args.Flags(add_flags, resolve_flags, _configured))
    if os.environ.get(_MARKER) == "1":
        _install_engine()


def enable() -> None:
    """Install everything: this process has made the configuration of an engine that reuses.

    Raises:
        UnsupportedVersionError: this vLLM is not a supported one.
        RuntimeError: something that has to be patched is missing.
    """
    from vllm_segreuse.compat import envs
    from vllm_segreuse.engine.version import require_supported_vllm

    require_supported_vllm()
    os.environ[_MARKER] = "1"
    envs.install()  # again: the marker is a variable of ours
    _install_front_end()
    _install_engine()


def _configured(
    transfer: Any, offloading_gib: float | None, backend: str, keeps_windows: bool
) -> tuple[Any, Check] | None:
    """An engine's configuration is made; see `compat.engine_args.Configure`."""
    from vllm_segreuse.config.launch import (
        KvOffloading,
        check_config,
        check_engine,
        names_connector,
    )

    if not names_connector(transfer):
        return None
    enable()
    offloading = None if offloading_gib is None else KvOffloading(offloading_gib, backend)
    checked = check_config(transfer, offloading=offloading, keeps_windows=keeps_windows)
    return checked, lambda config: check_engine(config, checked)


def _install_front_end() -> None:
    from vllm_segreuse.compat import (
        api_server,
        async_llm,
        detokenizer,
        input_processor,
        openai_protocols,
        openai_streams,
        renderer,
        run_batch,
    )
    from vllm_segreuse.features.knowledge.naming import cut, named
    from vllm_segreuse.serve import application, batch_files, front, report, requests

    detokenizer.install()
    input_processor.install(requests.check_params, requests.check_prompt)
    renderer.install(renderer.DocumentCallbacks(named.get, cut, requests.check_named))
    openai_streams.install(report.report_of)
    openai_protocols.install(requests.refuse_unread)
    async_llm.install(requests.check_prompt, front.watched)
    api_server.install(application.registered)
    run_batch.install(run_batch.Lines(batch_files.read_line, batch_files.check_line))


def _install_engine() -> None:
    """What engine and worker processes need."""
    from vllm_segreuse.compat import (
        engine_core,
        mamba_mixer2,
        model_runner,
        omp_processes,
        prefix_cache_stats,
        sampler,
        scheduler,
        worker,
        worker_utils,
    )
    from vllm_segreuse.config.launch import runs_alone
    from vllm_segreuse.engine.version import require_supported_vllm

    require_supported_vllm()
    engine_core.install(_weights_digest)
    mamba_mixer2.install()
    model_runner.install(_pass_bytes)
    omp_processes.install(runs_alone)
    prefix_cache_stats.install()
    sampler.install()
    scheduler.install()
    worker.install(_left_for_kv)
    worker_utils.install()


def _pass_bytes(vllm_config: VllmConfig) -> int:
    """Device memory that the pass takes beside the model; 0 where none runs."""
    from vllm_segreuse.config.launch import names_connector
    from vllm_segreuse.config.memory import pass_bytes

    return pass_bytes(vllm_config) if names_connector(vllm_config.kv_transfer_config) else 0


def _weights_digest(model: Any) -> int:
    """A number for a model's weights, in a worker."""
    from vllm_segreuse.model.weights import weights_digest

    return weights_digest(model)


def _left_for_kv(available: int, vllm_config: VllmConfig, specs: Mapping[str, Any]) -> int:
    """Bytes for KV, of those that are available for it and for what lies beside it."""
    from vllm_segreuse.config.launch import cuts_of
    from vllm_segreuse.config.memory import kv_bytes

    cuts = cuts_of(vllm_config.kv_transfer_config)
    return kv_bytes(available, vllm_config, specs, cuts) if cuts else available
