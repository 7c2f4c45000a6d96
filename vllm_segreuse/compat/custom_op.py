# SPDX-License-Identifier: Apache-2.0
"""`vllm/model_executor/custom_op.py`: layers that run their kernel instead of plain torch for a
while.

Under torch.compile vLLM leaves rotary embeddings and activations in plain torch, for the compiler
to fuse; run eagerly they are half a dozen kernels each. Switching them on for good
(`custom_ops=["all"]`) would change what is compiled.

Obsolete when rotary embeddings and activations are operations of `vllm.ir`, whose kernels can be
chosen per call, as norms are: vllm-project/vllm#32358.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn


def plain_ops(model: nn.Module, method: str) -> list[nn.Module]:
    """A model's rotary embeddings and activations that have a kernel and do not run it.

    Args:
        method: the kernel's, such as `forward_cuda`.
    """
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers import activation
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    found = []
    for module in model.modules():
        known = isinstance(module, RotaryEmbeddingBase) or (
            isinstance(module, CustomOp) and type(module).__module__ == activation.__name__
        )
        if not known or getattr(type(module), method) is getattr(CustomOp, method):
            continue
        if not hasattr(module, "_forward_method"):
            raise RuntimeError(
                f"segment reuse has to replace {type(module).__qualname__}._forward_method, which "
                "this vLLM does not have; install a supported vLLM, or start without segment reuse"
            )
        if module._forward_method != getattr(module, method):
            found.append(module)
    return found


@contextlib.contextmanager
def running(method: str, ops: Sequence[nn.Module]) -> Iterator[None]:
    """Has these custom ops run the given method inside the block."""
    before = [op._forward_method for op in ops]
    for op in ops:
        op._forward_method = getattr(op, method)
    try:
        yield
    finally:
        for op, original in zip(ops, before, strict=True):
            op._forward_method = original
