# SPDX-License-Identifier: Apache-2.0
"""vLLM's models with multi-head latent attention, with a prefix cache on any CPU.

vLLM 0.32 has two backends of MLA for CPUs: one that needs AMX, and a plain one, whose prefills know
no context. With the plain one it turns its prefix cache off, and so reuse is refused. Here prefills
attend to the cache in plain torch; all else (the model, writes, decodes, metadata) is vLLM's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

BLOCK_SIZE = 16
"""The only one that vLLM's plain backend takes."""


@contextmanager
def prefix_cache_for_latents() -> Iterator[None]:
    """Engines that start meanwhile have one, with vLLM's plain backend, on every machine."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    checked = CpuPlatform.check_and_update_config.__func__

    def with_prefix_cache(platform: Any, vllm_config: Any) -> None:
        vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        cached = cache.enable_prefix_caching
        checked(platform, vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked
        cache.enable_prefix_caching = cached

    with (
        patch.object(CpuPlatform, "check_and_update_config", classmethod(with_prefix_cache)),
        patch.object(CPUMLAImpl, "forward_mha", _prefill),
    ):
        yield


def _prefill(
    impl: Any,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    metadata: Any,
    k_scale: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
) -> None:
    """Causal attention of prefills, rows `[tokens, heads, channels]`, over all that is cached.

    Keys and values are projected from their latent vectors, as for a prefill without a context.
    """
    prefill, heads = metadata.prefill, impl.num_heads
    bounds = prefill.query_start_loc.tolist()
    context = prefill.chunked_context
    before = [0] * (len(bounds) - 1) if context is None else context.context_lens_list
    output = output.view(-1, heads, impl.v_head_dim)
    for row, first in enumerate(before):
        mine = slice(bounds[row], bounds[row + 1])
        count = first + mine.stop - mine.start
        blocks = prefill.block_table[row, : -(-count // cache.shape[1])].long()
        latent, turned = (
            cache[blocks].flatten(0, 1)[:count].split([impl.kv_lora_rank, k_pe.shape[-1]], -1)
        )
        both = impl.kv_b_proj(latent)[0].view(count, heads, -1)
        keys, values = both.split([impl.qk_nope_head_dim, impl.v_head_dim], -1)
        keys = torch.cat([keys, turned[:, None].expand(-1, heads, -1)], -1)
        logits = torch.einsum("qhd,khd->hqk", q[mine].float() * impl.scale, keys.float())
        own = torch.arange(first, count)[:, None]
        logits.masked_fill_(torch.arange(count) > own, float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.float())
        output[mine] = mixed.to(output.dtype)
