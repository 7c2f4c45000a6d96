# SPDX-License-Identifier: Apache-2.0
"""Patches as the plugin installs them, with what it hands to them."""

import importlib

import pytest

from vllm_segreuse import plugin

ENGINE = {
    *("engine_core", "mamba_mixer2", "model_runner", "omp_processes", "prefix_cache_stats"),
    *("sampler", "scheduler", "worker", "worker_utils"),
}
"""What a process of an enabled engine patches, by the files of `compat`."""


def register(monkeypatch: pytest.MonkeyPatch, *patches: str) -> None:
    """vLLM loads the plugin in a process of an enabled engine; of `ENGINE`, it patches these only.

    Twice, as vLLM may do.
    """
    for name in ENGINE.difference(patches):
        module = importlib.import_module(f"vllm_segreuse.compat.{name}")
        monkeypatch.setattr(module, "install", lambda *_: None)
    monkeypatch.setenv("VLLM_SEGREUSE_ENABLED", "1")
    plugin.register()
    plugin.register()
