# SPDX-License-Identifier: Apache-2.0
"""The runners' models are at hand, and room is held only where a GPU's is measured."""

import importlib
import inspect
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import kv_connector

from tests.compat.registering import register
from vllm_segreuse.compat import model_runner
from vllm_segreuse.config import memory

GPU = SimpleNamespace(type="cuda")


def config(backend: str | None = None, connector: bool = True) -> Any:
    from vllm_segreuse import kv_transfer_config

    model = SimpleNamespace(
        use_mla=False,
        dtype=torch.bfloat16,
        max_model_len=1000,
        get_hidden_size=lambda: 64,
        get_num_attention_heads=lambda parallel: 8,
        get_head_size=lambda: 128,
        get_num_kv_heads=lambda parallel: 8,
        is_multimodal_model=False,
        hf_config=SimpleNamespace(),
        hf_text_config=SimpleNamespace(),
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100_000),
        lora_config=None,
        speculative_config=None,
        attention_config=SimpleNamespace(backend=backend and SimpleNamespace(name=backend)),
        kv_transfer_config=kv_transfer_config() if connector else None,
    )


RUNNERS = [getattr(importlib.import_module(name), kind) for name, kind in model_runner.RUNNERS]
MEASURING = [runner for runner in RUNNERS if "profile_run" in vars(runner)]


def without_room(vllm_config: Any) -> int:
    """No pass runs, so that it takes no memory."""
    return 0


@pytest.fixture
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners that load nothing and measure nothing, about to be wrapped."""
    monkeypatch.setattr(model_runner, "_latest", None)
    for runner in RUNNERS:
        monkeypatch.setattr(runner, "load_model", lambda self, *_, **__: "loaded")
    for runner in MEASURING:
        monkeypatch.setattr(
            runner, "profile_run", lambda self, *_, **__: torch.empty(3, device=GPU)
        )


def test_the_runners_are_those_of_both_generations() -> None:
    assert {runner.__module__ for runner in MEASURING} == {
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.worker.gpu.model_runner",
    }
    for runner in MEASURING:
        assert {"vllm_config", "device"} <= set(inspect.signature(runner).parameters)


@pytest.mark.usefixtures("unwrapped")
@pytest.mark.parametrize("kind", RUNNERS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_the_model_that_a_runner_has_loaded_is_at_hand(kind: Any) -> None:
    model_runner.install(without_room)
    model_runner.install(without_room)
    with pytest.raises(RuntimeError, match="was not registered in this worker process"):
        model_runner.loaded_model()
    runner = kind.__new__(kind)
    runner.model = torch.nn.Identity()
    assert runner.load_model(load_dummy_weights=True) == "loaded"
    assert model_runner.loaded_model() is runner.model
    later = kind.__new__(kind)
    later.model = torch.nn.Identity()
    later.load_model()
    assert model_runner.loaded_model() is later.model, "a process may load more than one"
    del runner, later
    with pytest.raises(RuntimeError, match="no handle on the loaded model"):
        model_runner.loaded_model()


@pytest.mark.usefixtures("unwrapped")
def test_only_a_draft_that_has_kv_is_at_hand() -> None:
    model_runner.install(without_room)
    runner = RUNNERS[0].__new__(RUNNERS[0])
    runner.load_model()
    assert model_runner.loaded_drafter() is None
    runner.drafter = SimpleNamespace()  # n-grams
    assert model_runner.loaded_drafter() is None
    runner.drafter = SimpleNamespace(_draft_attn_layer_names=set())  # Gemma 4's MTP
    assert model_runner.loaded_drafter() is None
    runner.drafter = SimpleNamespace(_draft_attn_layer_names={"draft.layers.0"})
    assert model_runner.loaded_drafter() is runner.drafter


@pytest.mark.usefixtures("unwrapped")
@pytest.mark.parametrize("kind", MEASURING, ids=lambda kind: kind.__module__)
def test_a_runner_measures_beside_what_the_pass_takes(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: asked.append(size))
    register(monkeypatch, "model_runner")
    runner = kind.__new__(kind)
    runner.vllm_config, runner.device = config(), GPU
    runner.profile_run()
    assert asked == [memory.pass_bytes(runner.vllm_config), 3], "held first, and while it measures"


class Held:
    """Memory on a device."""


@pytest.mark.usefixtures("unwrapped")
@pytest.mark.parametrize("kind", MEASURING, ids=lambda kind: kind.__module__)
def test_room_is_held_while_memory_is_measured(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Any, Any]] = []
    held: list[weakref.ref[Held]] = []

    def empty(size: int, dtype: Any, device: Any) -> Held:
        asked.append((size, dtype, device))
        made = Held()
        held.append(weakref.ref(made))
        return made

    def measured(_: Any, randomize: bool) -> bool:
        assert held[-1]() is not None
        if not randomize:
            raise ArithmeticError
        return randomize

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(kind, "profile_run", measured)
    register(monkeypatch, "model_runner")
    runner = SimpleNamespace(vllm_config=config(), device=GPU)
    assert kind.profile_run(runner, True) is True
    assert asked == [(memory.pass_bytes(runner.vllm_config), torch.uint8, GPU)]
    with pytest.raises(ArithmeticError):
        kind.profile_run(runner, False)
    assert [each() for each in held] == [None, None], "it is given back"


@pytest.mark.usefixtures("unwrapped")
@pytest.mark.parametrize("kind", MEASURING, ids=lambda kind: kind.__module__)
@pytest.mark.parametrize(("device", "connector"), [(torch.device("cpu"), True), (GPU, False)])
def test_nothing_is_held_elsewhere(
    kind: Any, device: Any, connector: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was held"))
    monkeypatch.setattr(kind, "profile_run", lambda self: "measured")
    register(monkeypatch, "model_runner")
    runner = SimpleNamespace(vllm_config=config(connector=connector), device=device)
    assert kind.profile_run(runner) == "measured"


# CUDA graphs.


@pytest.fixture
def latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "_latest", None)
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)


def loaded(kind: Any) -> Any:
    """A runner of a class whose methods are wrapped, and that has loaded a model."""
    model_runner.install(without_room)
    runner = kind.__new__(kind)
    runner.load_model()
    return runner


@pytest.mark.usefixtures("unwrapped", "latest")
@pytest.mark.parametrize("kind", MEASURING, ids=lambda kind: kind.__module__)
def test_who_asked_is_told_once_that_graphs_are_captured(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(kind, "capture_model", lambda self, **_: log.append("captured") or 3)
    other, runner = loaded(kind), loaded(kind)
    model_runner.once_captured(lambda: log.append("told"))
    assert other.capture_model() == 3
    assert runner.capture_model(profile_only=True) == 3
    assert log == ["captured"] * 2, "another model's, and what is only measured"
    assert runner.capture_model() == runner.capture_model() == 3
    assert log == ["captured"] * 3 + ["told", "captured"]


def descriptors(**graphs: list[dict[str, Any]]) -> dict[Any, Any]:
    """By mode, what each runner says of its graphs: both names for adapters."""
    return {
        CUDAGraphMode[mode]: [
            SimpleNamespace(**{"has_lora": False, "num_active_loras": 0, **graph})
            for graph in given
        ]
        for mode, given in graphs.items()
    }


def runner_with_graphs(kind: Any, graphs: dict[Any, Any]) -> Any:
    runner = loaded(kind)
    token_ids, positions = torch.zeros(9, dtype=torch.int32), torch.arange(9)
    if "worker.gpu.model_runner" in kind.__module__:
        runner.cudagraph_manager = SimpleNamespace(_capture_descs=graphs)
        runner.pcp_manager = runner.speculator = None
        runner.input_buffers = SimpleNamespace(input_ids=token_ids, positions=positions)
    else:
        runner.cudagraph_dispatcher = SimpleNamespace(
            cudagraph_keys={CUDAGraphMode.PIECEWISE: [], **graphs}
        )
        runner.input_ids, runner.positions = SimpleNamespace(gpu=token_ids), positions
    return runner


ADAPTED = {"num_tokens": 3, "has_lora": True, "num_active_loras": 2}


@pytest.mark.usefixtures("unwrapped", "latest")
@pytest.mark.parametrize("kind", MEASURING, ids=lambda kind: kind.__module__)
def test_piecewise_graphs_and_what_they_read(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = descriptors(
        PIECEWISE=[{"num_tokens": 8}, ADAPTED, {"num_tokens": 1}, {"num_tokens": 4}],
        FULL=[{"num_tokens": 2}],
    )
    runner = runner_with_graphs(kind, graphs)
    found = model_runner.captured_graphs()
    assert found is not None
    assert found.sizes == (1, 4, 8)
    assert found.token_ids.dtype == torch.int32
    assert found.positions.tolist() == list(range(9))
    assert found.sampled_first is hasattr(runner, "cudagraph_manager"), "V2"
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    assert model_runner.captured_graphs() is None
    del runner


@pytest.mark.usefixtures("unwrapped", "latest")
@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("comes_before_drafts", [False, True])
def test_no_graph_overwrites_what_drafts_are_made_of(
    comes_before_drafts: bool, has_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 asks connectors between sampling and drafting, 0.32 behind both."""

    def deferred(self: Any, finished_req_ids: set[str], defer_finalize: bool = False) -> Any: ...

    def at_the_end(self: Any, finished_req_ids: set[str]) -> Any: ...

    post_forward = deferred if comes_before_drafts else at_the_end
    monkeypatch.setattr(kv_connector.ActiveKVConnector, "post_forward", post_forward)
    [kind] = [it for it in MEASURING if "worker.gpu.model_runner" in it.__module__]
    runner = runner_with_graphs(kind, descriptors(PIECEWISE=[{"num_tokens": 4}]))
    runner.speculator = object() if has_drafts else None
    found = model_runner.captured_graphs()
    assert found is not None
    assert found.sampled_first is not (comes_before_drafts and has_drafts)


@pytest.mark.usefixtures("unwrapped", "latest")
@pytest.mark.parametrize(
    "graphs", [descriptors(), descriptors(PIECEWISE=[ADAPTED]), descriptors(FULL=[ADAPTED])]
)
@pytest.mark.parametrize("kind", MEASURING, ids=lambda kind: kind.__module__)
def test_a_pass_has_no_graphs_of_other_kinds(kind: Any, graphs: dict[Any, Any]) -> None:
    runner = runner_with_graphs(kind, graphs)
    assert model_runner.captured_graphs() is None
    if hasattr(runner, "pcp_manager"):
        given = descriptors(PIECEWISE=[{"num_tokens": 8}])
        runner.cudagraph_manager = SimpleNamespace(_capture_descs=given)
        assert model_runner.captured_graphs() is not None
        runner.pcp_manager = object()
        assert model_runner.captured_graphs() is None, "ranks compute parts of a prompt"
        runner.pcp_manager, runner.cudagraph_manager = None, None
        assert model_runner.captured_graphs() is None
