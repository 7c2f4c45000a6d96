# SPDX-License-Identifier: Apache-2.0
"""Fused norms for the eager pass on CPU.

Under torch.compile vLLM fuses a norm's arithmetic; run eagerly, it is half a dozen passes over
memory. vLLM's CPU build has the fused kernels but does not offer them to `vllm.ir`
(`kernels/vllm_c.py` is for GPUs). They are registered here under a name of their own and preferred
during the pass only, through vLLM's own `set_priority`: the stock path dispatches as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

_PROVIDER = "segreuse_cpu"


def _plain(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.stride(-1) == 1
    )


def _register() -> None:
    """Add the kernels to vLLM's registry, once per process."""
    if _PROVIDER in ir.ops.rms_norm.impls:
        return

    @ir.ops.rms_norm.register_impl(
        _PROVIDER,
        supports_args=lambda x, weight, epsilon, variance_size=None: _plain(
            x, weight, variance_size
        ),
        supported=True,
    )
    def rms_norm(
        x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(
        _PROVIDER,
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
            _plain(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()
        ),
        supported=True,
        inplace=True,
    )
    def fused_add_rms_norm(
        x: Tensor,
        x_residual: Tensor,
        weight: Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


@contextlib.contextmanager
def fast_norms() -> Iterator[None]:
    """Prefer the fused kernels inside the block; does nothing where they do not exist."""
    if not (current_platform.is_cpu() and hasattr(torch.ops._C, "fused_add_rms_norm")):
        yield
        return
    _register()
    with contextlib.ExitStack() as stack:
        for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            # An empty priority means native; it must stay the fallback.
            others = [p for p in op.get_priority() if p != "native"]
            stack.enter_context(op.set_priority([_PROVIDER, *others, "native"]))
        yield
