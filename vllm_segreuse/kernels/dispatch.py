# SPDX-License-Identifier: Apache-2.0
"""Which version of each kernel runs: the fastest that this machine has and that takes the pages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_segreuse.kernels import (
    cpu,
    cpu_store,
    cuda,
    flash_attention,
    reference,
    reference_codecs,
)
from vllm_segreuse.kernels.arguments import FLOATS
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.kernels.pages import PageLayout

LONG_RUN = 16
"""Of kernels by Triton, and of latent layers (`bench kernels`)."""


@dataclass(frozen=True)
class Kernels:
    """The kernels in use; signatures as in `reference.py`.

    Attributes:
        sparse_attention: None where rows of the attention backend's own kernel must do.
        plan_attention: `triton_schedule.plan`, which prepares what `sparse_attention` takes as
            `schedule`, once for all layers that are alike; None where it needs none.
        description: which they are, and why better ones are not used.
        long_run: tokens per run of neighbours, on average, from which on rows of the attention
            backend's own kernel are at least as fast as `sparse_attention`; None if they never are.
        encode: pages to scales and codes (`reference_codecs.encode`).
        decode: `align` from such pages.
        carry: changes of recomputed tokens to those behind them; None where none is fast enough.
    """

    align: Callable[..., None]
    store: Callable[..., None]
    token_scores: Callable[..., torch.Tensor]
    sparse_attention: Callable[..., None] | None
    plan_attention: Callable[..., Any] | None
    description: str
    long_run: int | None = LONG_RUN
    encode: Callable[..., torch.Tensor] = reference_codecs.encode
    decode: Callable[..., None] = reference.align
    carry: Callable[..., None] | None = None


def choose(
    device: torch.device,
    dtype: torch.dtype,
    layout: PageLayout,
    queries: torch.dtype | None = None,
) -> Kernels:
    """The kernels for pages of one device, dtype and layout; queries may be of another dtype."""
    choice = _for_cpu if device.type == "cpu" else for_gpu
    return choice(dtype, layout, queries or dtype)


def codec_refused(codec: Codec, dtype: torch.dtype) -> str | None:
    """Why pages of a dtype cannot be stored by a codec, in one sentence; None if they can."""
    if codec is Codec.RAW or dtype in FLOATS:
        return None
    return f"KV in {dtype} is stored by codec raw only, not {codec}"


def _for_cpu(dtype: torch.dtype, layout: PageLayout, queries: torch.dtype) -> Kernels:
    missing = cpu.unavailable()
    if missing:
        return replace(_plain(missing), carry=reference.carry)
    name = f"C++ ({cpu.instruction_set()})"
    if layout.latent or not cpu.supports_attention(layout.keys, dtype, queries):
        found = _without_attention(cpu.align, cpu_store.store, name, _shape(layout, dtype, queries))
        return replace(found, encode=cpu_store.encode, decode=cpu.align, carry=cpu.carry)
    return Kernels(
        cpu.align,
        cpu_store.store,
        cpu.token_scores,
        cpu.sparse_attention,
        None,
        f"alignment, attention and scores by {name}",
        long_run=None,
        encode=cpu_store.encode,
        decode=cpu.align,
        carry=cpu.carry,
    )


def for_gpu(dtype: torch.dtype, layout: PageLayout, queries: torch.dtype) -> Kernels:
    try:
        triton_align, attention, schedule, scores, carrying = (
            importlib.import_module(f"vllm_segreuse.kernels.triton_{name}")
            for name in ("align", "attention", "schedule", "scores", "carry")
        )
    except ImportError as error:
        return _plain(f"no Triton: {error}")
    missing = cuda.unavailable()
    aligner = triton_align if missing else cuda
    name = f"Triton ({missing})" if missing else "CUDA C++"
    carry = carrying.carry if carrying.supports(layout, dtype) else None
    if not aligner.supports(layout, dtype):
        return replace(_plain(f"{name} does not move {dtype}"), carry=carry)
    attending = not layout.latent and all(
        kernel.supports(layout, dtype, queries) for kernel in (attention, scores)
    )
    if not attending:
        shape = _shape(layout, dtype, queries)
        found = _without_attention(aligner.align, reference.store, name, shape)
        return replace(found, carry=carry)
    flash = flash_attention.supports(layout, dtype, queries)
    return Kernels(
        aligner.align,
        reference.store,
        scores.token_scores,
        attention.sparse_attention,
        schedule.plan_with_flash if flash else schedule.plan,
        f"alignment by {name}, attention and scores by Triton"
        + (", common keys by FlashAttention 3" if flash else ""),
        carry=carry,
    )


def _shape(layout: PageLayout, dtype: torch.dtype, queries: torch.dtype) -> str:
    if layout.latent:
        return f"latent KV of {layout.latent.shape[2]} channels"
    beside = "" if queries == dtype else f", queries in {queries}"
    return f"head size {layout.keys.shape[2]} in {dtype}{beside}"


def _without_attention(
    align: Callable[..., None], store: Callable[..., None], name: str, why: str
) -> Kernels:
    return Kernels(
        align,
        store,
        reference.token_scores,
        None,
        None,
        f"alignment by {name}, attention by rows of vLLM's kernel and scores by torch ({why})",
    )


def _plain(why: str) -> Kernels:
    return Kernels(
        reference.align,
        reference.store,
        reference.token_scores,
        None,
        None,
        f"alignment and scores by torch, attention by rows of vLLM's kernel ({why})",
    )
