# SPDX-License-Identifier: Apache-2.0
"""Examining models in the tests' own process."""

import os
from collections.abc import Iterator

import pytest
from vllm.model_executor.models import registry


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM looks at a model's code in this process, which takes no seconds for each; what the
    doctor sets for its own process is put back."""

    def look(self: registry._LazyRegisteredModel) -> registry._ModelInfo:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    monkeypatch.setattr(registry._LazyRegisteredModel, "inspect_model_cls", look)
    before = dict(os.environ)
    registry._try_inspect_model_cls.cache_clear()
    yield
    registry._try_inspect_model_cls.cache_clear()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
