# SPDX-License-Identifier: Apache-2.0
"""A handle on the loaded model for the worker-side connector.

vLLM gives connectors the KV caches but not the model (`register_kv_caches`,
`v1/worker/gpu_model_runner.py`). Wrapping `load_model` of each runner class keeps a reference to
the runner of this process. Obsolete once connectors are handed the model.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any

from vllm_segreuse.compat.patching import wrap

_RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
)

_latest: weakref.ref[Any] | None = None


def install() -> None:
    """Wrap `load_model` of vLLM's model runners (V1 on GPU and CPU, V2), once."""
    for module_name, class_name in _RUNNERS:
        wrap(getattr(importlib.import_module(module_name), class_name), "load_model", _load_model)


def _load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        global _latest
        _latest = weakref.ref(self)
        return result

    return load_model


def loaded_model() -> Any:
    """The model that this process loaded last.

    Raises:
        RuntimeError: no model was loaded since `install`.
    """
    runner = _latest() if _latest is not None else None
    if runner is None:
        raise RuntimeError(
            "segment reuse has no handle on the loaded model: the plugin was not registered in "
            "this worker process (does VLLM_PLUGINS leave out 'segreuse'?)"
        )
    return runner.get_model()
