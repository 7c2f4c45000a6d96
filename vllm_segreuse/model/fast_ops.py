# SPDX-License-Identifier: Apache-2.0
"""Fused kernels for the eager pass.

Under torch.compile vLLM fuses the arithmetic of norms, rotations and activations; run eagerly, each
is half a dozen passes over memory. During the pass, and then only, their own kernels run: the stock
path computes as before.

Norms go through `vllm.ir`, whose priorities can be set for a while. On GPUs `vllm_c` is there.
vLLM's CPU build has the fused kernels but does not offer them (`kernels/vllm_c.py` is for GPUs):
they are registered here under a name of their own. Without AVX-512 BF16 they truncate what they
write in bf16 (`csrc/cpu/cpu_types_x86.hpp`), which makes each norm and the residual stream smaller
by half a step: there the native ones run, as on vLLM's own path.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm import ir
from vllm.platforms import current_platform

from vllm_segreuse.compat.custom_op import plain_ops, running

_PROVIDER = "segreuse_cpu"
_KERNEL = "forward_cuda"


@functools.cache
def _rounds(dtype: torch.dtype) -> bool:
    """Whether the CPU kernels round what they write in this dtype to the nearest."""
    wide = torch.linspace(-2.0, 2.0, 512).to(dtype).float().view(1, -1)
    exact, found = torch.empty_like(wide), torch.empty_like(wide, dtype=dtype)
    torch.ops._C.rms_norm(exact, wide, torch.ones(512), 1e-6)
    torch.ops._C.rms_norm(found, wide.to(dtype), torch.ones(512, dtype=dtype), 1e-6)
    # Sums in another order may turn a few.
    return bool((found == exact.to(dtype)).float().mean() > 0.9)


def _plain(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.stride(-1) == 1
        and _rounds(x.dtype)
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


class FastOps:
    """Which kernels the pass prefers for a model.

    Args:
        model: the loaded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms: str | None = None
        self._others: list[nn.Module] = []
        if current_platform.is_cuda():
            self._norms = "vllm_c"
            self._others = plain_ops(model, _KERNEL)
        elif current_platform.is_cpu() and hasattr(torch.ops._C, "fused_add_rms_norm"):
            _register()
            self._norms = _PROVIDER

    @contextlib.contextmanager
    def preferred(self) -> Iterator[None]:
        """Prefer them inside the block; does nothing where they do not exist."""
        if self._norms is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
                # An empty priority means native; it must stay the fallback.
                others = [p for p in op.get_priority() if p not in ("native", self._norms)]
                stack.enter_context(op.set_priority([self._norms, *others, "native"]))
            stack.enter_context(running(_KERNEL, self._others))
            yield
