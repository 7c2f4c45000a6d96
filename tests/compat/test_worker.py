# SPDX-License-Identifier: Apache-2.0
"""Workers leave room for boundary states, where any are kept, and else what vLLM has found."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.compat.registering import register
from vllm_segreuse import kv_transfer_config
from vllm_segreuse.compat import worker

WORKERS = [getattr(importlib.import_module(name), kind) for name, kind in worker.WORKERS]
SPEC = SimpleNamespace(page_size_bytes=16 * 132, block_size=16)


def available(kind: Any, transfer: Any) -> int:
    made = kind.__new__(kind)
    made.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: 64),
        kv_transfer_config=transfer,
    )
    made.get_kv_cache_spec = lambda: {"layer": SPEC, "another": SPEC}
    return int(made.determine_available_memory())


@pytest.mark.parametrize("kind", WORKERS, ids=lambda kind: kind.__name__)
def test_states_take_their_part_of_the_caches_memory(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in WORKERS:
        monkeypatch.setattr(each, "determine_available_memory", lambda self: 9000)
    register(monkeypatch, "worker")
    table = {"w_exact": {1: 4, 2: 8, "all": 9}}
    assert available(kind, kv_transfer_config(similarity=table)) == 4500
    assert available(kind, kv_transfer_config(similarity={})) == 9000
    assert available(kind, kv_transfer_config()) == 9000
    assert available(kind, None) == 9000
