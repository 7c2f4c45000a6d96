# SPDX-License-Identifier: Apache-2.0
"""Examining models in the tests' own process."""

import os
from collections.abc import Iterator

import pytest
from vllm import ModelRegistry
from vllm.model_executor.models import registry


def unknown(self: object, module_hash: str) -> None:
    """Nothing of an earlier run is remembered."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the doctor sets for its own process is put back. Where vLLM would look at code in
    another process, which takes seconds for each, it does so in this one."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    named = registry._LazyRegisteredModel
    monkeypatch.setattr(named, "_load_modelinfo_from_cache", unknown)
    before = dict(os.environ)
    forget = registry._try_inspect_model_cls.cache_clear
    forget()
    yield
    forget()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
