# SPDX-License-Identifier: Apache-2.0
"""What KV, our index and a pass take, in figures that a deployment is planned with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_segreuse.cache.index import bytes_per_block
from vllm_segreuse.config.memory import pass_bytes
from vllm_segreuse.engine.stage import layers_of_stages

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from segreuse_tools.doctor.examination import Examined

DOCUMENT_TOKENS = 1000
_GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, but for the index, which is in the scheduler's process.

    Attributes:
        weight_bytes: parameters, an equal share of them.
        kv_bytes_per_token: at all layers that it has.
        kv_bytes_per_document: of 1,000 tokens, in whole blocks.
        kv_bytes_per_longest_prompt: of one prompt of maximum length.
        documents_per_gib: how many of them a GiB of KV cache holds.
        tokens_per_gib: how many tokens it holds.
        index_bytes_per_block: most that our tables take of a KV block.
        index_bytes_per_gib: the same for a GiB of KV cache.
        pass_bytes: most that a pass holds beside a step's activations, reserved at start.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_document: int
    kv_bytes_per_longest_prompt: int
    documents_per_gib: int
    tokens_per_gib: int
    index_bytes_per_block: int
    index_bytes_per_gib: int
    pass_bytes: int


def _by_stage(vllm_config: VllmConfig, examined: Examined) -> list[tuple[tuple[int, int], ...]]:
    """`Examined.kv` of each pipeline stage; the one that takes most decides."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return [examined.kv]
    return [examined.kv[it.start : it.stop] for it in layers_of_stages(vllm_config)]


def memory_of(vllm_config: VllmConfig, examined: Examined) -> Memory:
    """The figures of a model whose layers were examined.

    Args:
        vllm_config: with the parallel sizes that were asked for.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    block_size = vllm_config.cache_config.block_size
    ranks = parallel.tensor_parallel_size
    # Ranks beyond the number of a layer's KV heads hold copies: all ranks, of latent vectors.
    per_token = max(
        sum(size // heads * max(1, heads // ranks) for heads, size in layers)
        for layers in _by_stage(vllm_config, examined)
    )
    block_bytes = per_token * block_size
    document_blocks = -(-DOCUMENT_TOKENS // block_size)
    longest_blocks = -(-model.max_model_len // block_size)
    blocks = _GIB // block_bytes
    return Memory(
        weight_bytes=examined.weight_bytes // (ranks * parallel.pipeline_parallel_size),
        kv_bytes_per_token=per_token,
        kv_bytes_per_document=document_blocks * block_bytes,
        kv_bytes_per_longest_prompt=longest_blocks * block_bytes,
        documents_per_gib=blocks // document_blocks,
        tokens_per_gib=blocks * block_size,
        index_bytes_per_block=bytes_per_block(block_size),
        index_bytes_per_gib=blocks * bytes_per_block(block_size),
        pass_bytes=pass_bytes(vllm_config),
    )
