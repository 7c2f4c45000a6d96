# SPDX-License-Identifier: Apache-2.0
"""The GPU's code paths of vLLM on a CPU: Model Runner V2, its connector, two steps in flight, and
the attention backends of GPUs.

Triton kernels run in Triton's interpreter. FlashAttention and FlashInfer are emulated at the
function that a GPU would run (`emulated.py`); everything above it, metadata builders included, is
theirs. Nothing here says how fast anything is, nor that a GPU's kernels agree.

It changes vLLM for the whole process: `test_pretending.py` starts one for each backend.
"""

import contextlib
import os
from types import SimpleNamespace
from typing import Any

BACKEND = os.environ.get("SEGREUSE_PRETEND_BACKEND")


class _Nothing:
    """A stream or an event of a device on which everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self if name == "record_event" else None

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def pretend(backend: str, async_scheduling: bool = True) -> None:
    """Make this process's vLLM take its GPU paths; call before it is imported."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    _offer_triton()
    _stub_cuda()
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tests.gpu import emulated
    from vllm_segreuse.kernels import dispatch

    emulated.install(backend)
    path = AttentionBackendEnum[backend].get_path()
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *_, **__: path)
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = async_scheduling

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    dispatch.choose = lambda device, dtype, layout, queries: dispatch.for_gpu(
        dtype, layout, queries
    )


def _offer_triton() -> None:
    """vLLM's CPU build takes Triton for usable if it has a backend of that name."""
    from triton.backends import backends

    from tests.kernels.triton_running import _repair_interpreter

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    _repair_interpreter()


def _stub_cuda() -> None:
    import torch

    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.current_stream = lambda *_: _Nothing()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.set_stream = lambda *_: None
    torch.cuda.get_device_capability = lambda *_: (8, 0)
