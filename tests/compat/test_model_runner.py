# SPDX-License-Identifier: Apache-2.0
"""What is wrapped is there in both runners, and room is held only where a GPU's is measured."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_segreuse.compat import model_runner
from vllm_segreuse.prefill import memory

GPU = SimpleNamespace(type="cuda")


def config(backend: str | None = None, connector: bool = True) -> Any:
    from vllm_segreuse import kv_transfer_config

    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=1000,
        get_hidden_size=lambda: 64,
        get_num_attention_heads=lambda parallel: 8,
        get_head_size=lambda: 128,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100_000),
        attention_config=SimpleNamespace(backend=backend and SimpleNamespace(name=backend)),
        kv_transfer_config=kv_transfer_config() if connector else None,
    )


def test_both_runners_have_what_is_wrapped() -> None:
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner as second

    for runner in (gpu_model_runner.GPUModelRunner, second.GPUModelRunner):
        for name in ("load_model", "profile_run", "get_model"):
            assert callable(vars(runner)[name]), f"{runner.__module__} has no {name}"
        assert {"vllm_config", "device"} <= set(inspect.signature(runner).parameters)


def test_the_connector_is_called_as_both_runners_call_it() -> None:
    """What the runners hand to the connector fits its signatures."""
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    from vllm_segreuse.connector import SegReuseConnector

    source = inspect.getsource(ActiveKVConnector)
    for name in ("start_load_kv", "wait_for_save", "register_kv_caches", "finish_forward"):
        assert f"kv_connector.{name}(" in source, f"Model Runner V2 no longer calls {name}"
        assert callable(getattr(SegReuseConnector, name))
    given = dict.fromkeys(
        ("scheduler_output", "request_state_indices", "request_ids", "num_tokens", "attn_metadata")
    )
    inspect.signature(SegReuseConnector.start_load_kv).bind(None, None, **given)


def test_room_is_held_while_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: asked.append((size, device)))
    runner = SimpleNamespace(vllm_config=config(), device=GPU)
    measure = model_runner._profile_run(lambda self, randomize: (len(asked), randomize))
    assert measure(runner, True) == (1, True)
    assert asked == [(memory.pass_bytes(runner.vllm_config), GPU)]


@pytest.mark.parametrize(("device", "connector"), [(torch.device("cpu"), True), (GPU, False)])
def test_nothing_is_held_elsewhere(
    device: Any, connector: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was held"))
    runner = SimpleNamespace(vllm_config=config(connector=connector), device=device)
    assert model_runner._profile_run(lambda self: "measured")(runner) == "measured"
