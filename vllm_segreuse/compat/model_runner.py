# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/worker/*model_runner.py`: the loaded model, room for the pass, and its CUDA graphs.

vLLM gives connectors the KV caches but not the model (`register_kv_caches`,
`v1/worker/gpu_model_runner.py`). Wrapping `load_model` of each runner class keeps a reference to
the runner of this process. So are proposers of drafts reached.

Nor can connectors report how much memory they need. While vLLM measures what the model needs
(`profile_run`), what the pass needs on top is held, so that the KV cache leaves room for it.

Nor are connectors told when CUDA graphs have been captured (`capture_model`), or what these read.

Obsolete when connectors are given the model (vllm-project/vllm#37339) and can reserve memory (none
filed that we know of).
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_segreuse.compat.patching import of_this_platform, wrap

if TYPE_CHECKING:
    import torch

RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
)
"""Module and name of each class whose methods are wrapped."""

_latest: weakref.ref[Any] | None = None
_once_captured: weakref.WeakKeyDictionary[Any, Callable[[], None]] = weakref.WeakKeyDictionary()


class CapturedGraphs(NamedTuple):
    """Piecewise CUDA graphs of the whole model (`compilation/cuda_graph.py`).

    Attributes:
        sizes: of how many tokens there is one, ascending.
        token_ids: int32 `[most tokens]`; a graph reads as many as it has.
        positions: int64 `[most tokens]`, likewise.
        sampled_first: whether a step has sampled from what its graph left, which the next one
            overwrites, and has made its drafts of that, before connectors go on behind it. V1 asks
            them as soon as the model has run (`maybe_get_kv_connector_output` in
            `v1/worker/gpu_model_runner.py`), V2 when it has sampled (`post_forward` in
            `v1/worker/gpu/model_runner.py`): in vLLM 0.32 behind the drafts, in 0.33 before them.
    """

    sizes: tuple[int, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    sampled_first: bool


def install(pass_bytes: Callable[[Any], int]) -> None:
    """Wrap methods of vLLM's model runners (V1 on GPU and CPU, V2), once.

    Args:
        pass_bytes: most bytes on the device that our pass takes with a `VllmConfig`; 0 where it
            does not run.
    """
    for module_name, class_name in of_this_platform(RUNNERS):
        runner = getattr(importlib.import_module(module_name), class_name)
        wrap(runner, "load_model", _load_model)
        if class_name == "GPUModelRunner":
            wrap(runner, "profile_run", _profile_run, pass_bytes)
            wrap(runner, "capture_model", _capture_model)


def _load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        global _latest
        _latest = weakref.ref(self)
        return result

    return load_model


def _profile_run(
    original: Callable[..., Any], pass_bytes: Callable[[Any], int]
) -> Callable[..., Any]:
    def profile_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _room_for_the_pass(pass_bytes, self.vllm_config, self.device):
            return original(self, *args, **kwargs)

    return profile_run


def _capture_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # V2 also captures to measure memory, and drops what it has captured.
        if not kwargs.get("profile_only") and self in _once_captured:
            _once_captured.pop(self)()
        return result

    return capture_model


@contextmanager
def _room_for_the_pass(
    pass_bytes: Callable[[Any], int], vllm_config: Any, device: Any
) -> Iterator[None]:
    """Holds as much memory as a pass takes, where an engine that reuses measures a GPU's."""
    import torch

    size = 0 if device.type == "cpu" else pass_bytes(vllm_config)
    if not size:
        yield
        return
    held = torch.empty(size, dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del held


def loaded_model() -> Any:
    """The model that this process loaded last.

    Raises:
        RuntimeError: no model was loaded since `install`.
    """
    return _runner().get_model()


def loaded_drafter() -> Any | None:
    """vLLM's proposer of a draft with KV of its own (`v1/spec_decode/llm_base_proposer.py`), loaded
    with that model; None: nothing drafts, or what does has none.

    Raises:
        RuntimeError: as `loaded_model`.
    """
    drafter = getattr(_runner(), "drafter", None)
    return drafter if getattr(drafter, "_draft_attn_layer_names", None) else None


class RunningRow(NamedTuple):
    """A request of the step under way.

    Attributes:
        request_id: vLLM's.
        first: of its tokens in the step.
        length: tokens of it there.
        position: of the first of them.
    """

    request_id: str
    first: int
    length: int
    position: int


def running_rows() -> list[RunningRow]:
    """Requests of the step under way, in the order of their tokens; of Model Runner V1.

    Raises:
        RuntimeError: as `loaded_model`.
    """
    runner = _runner()
    batch = runner.input_batch
    starts = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
    computed = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
    return [
        RunningRow(request_id, first, stop - first, position)
        for request_id, first, stop, position in zip(
            batch.req_ids[: batch.num_reqs], starts, starts[1:], computed, strict=False
        )
    ]


def once_captured(then: Callable[[], None]) -> None:
    """Call this when the runner of that model has captured its CUDA graphs, if it does.

    Raises:
        RuntimeError: as `loaded_model`.
    """
    _once_captured[_runner()] = then


def captured_graphs() -> CapturedGraphs | None:
    """The piecewise CUDA graphs of that model; None: there are none that a pass could run by.

    Graphs for adapters are no such, nor those that vLLM breaks up without compiling the model.

    Raises:
        RuntimeError: as `loaded_model`.
    """
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.config import CUDAGraphMode

    runner = _runner()
    if is_breakable_cudagraph_enabled():
        return None
    is_v2 = hasattr(runner, "cudagraph_manager")
    if is_v2:
        manager = runner.cudagraph_manager
        if manager is None or runner.pcp_manager is not None:
            return None
        captured = manager._capture_descs.get(CUDAGraphMode.PIECEWISE, ())
        sizes = {graph.num_tokens for graph in captured if not graph.num_active_loras}
        buffers = runner.input_buffers
        inputs = buffers.input_ids, buffers.positions
    else:
        captured = runner.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.PIECEWISE]
        sizes = {graph.num_tokens for graph in captured if not graph.has_lora}
        inputs = runner.input_ids.gpu, runner.positions
    if not sizes:
        return None
    has_read = is_v2 and not _drafts_behind_connectors(runner)
    return CapturedGraphs(tuple(sorted(sizes)), *inputs, sampled_first=has_read)


def _drafts_behind_connectors(runner: Any) -> bool:
    """Whether a step of V2 asks connectors what they have finished before its drafts are made, from
    what its graph left. vLLM 0.32 asks them last."""
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    is_deferred = "defer_finalize" in inspect.signature(ActiveKVConnector.post_forward).parameters
    return is_deferred and runner.speculator is not None


def _runner() -> Any:
    runner = _latest() if _latest is not None else None
    if runner is None:
        raise RuntimeError(
            "segment reuse has no handle on the loaded model: the plugin was not registered in "
            "this worker process (does VLLM_PLUGINS leave out 'segreuse'?)"
        )
    return runner
