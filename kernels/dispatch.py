# SPDX-License-Identifier: Apache-2.0
"""Which version of each kernel runs: the fastest that this machine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_segreuse.kernels import cpu, reference
from vllm_segreuse.kernels.pages import PageLayout


@dataclass(frozen=True)
class Kernels:
    """The kernels in use; signatures as in `reference.py`.

    Attributes:
        sparse_attention: None where the attention backend's own kernel, on one row per run of
            queries, is the best there is.
        description: which they are, and why better ones are not used.
    """

    align: Callable[..., None]
    token_scores: Callable[..., torch.Tensor]
    sparse_attention: Callable[..., None] | None
    description: str


def choose(device: torch.device, dtype: torch.dtype, layout: PageLayout) -> Kernels:
    """The kernels for pages of one device, dtype and layout."""
    if device.type == "cpu":
        return _for_cpu(dtype, layout)
    return _for_gpu(dtype)


def _for_cpu(dtype: torch.dtype, layout: PageLayout) -> Kernels:
    missing = cpu.unavailable()
    if missing:
        return _plain(missing)
    name = f"C++ ({cpu.instruction_set()})"
    if not cpu.supports_attention(layout.keys, dtype):
        return Kernels(
            cpu.align,
            reference.token_scores,
            None,
            f"align: {name}; attention: vLLM's, by rows; scores: torch "
            f"({dtype}, head size {layout.keys.shape[2]})",
        )
    return Kernels(
        cpu.align,
        cpu.token_scores,
        cpu.sparse_attention,
        f"align, attention, scores: {name}",
    )


def _for_gpu(dtype: torch.dtype) -> Kernels:
    return _plain(f"no kernels for {dtype} on this device yet")


def _plain(why: str) -> Kernels:
    return Kernels(
        reference.align,
        reference.token_scores,
        None,
        f"align, scores: torch; attention: vLLM's, by rows ({why})",
    )
