# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/attention/backends/*`: metadata builders for the pass alone.

The runner's builders must not be called during a pass: the main batch's metadata exists already,
and building again overwrites buffers that the main step is about to read or replay (FlashAttention
3's `scheduler_metadata`, FlashInfer's page indices and plans). And they are sized for
`max_num_seqs` rows, where a pass has one per run of active tokens.

Obsolete when a runner makes further builders on request, with a number of rows. None filed that we
know of; vllm-project/vllm#50945 makes several per group, for micro-batches.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata


def private_builder(
    backend: Any,
    kv_cache_spec: Any,
    layer_names: list[str],
    vllm_config: VllmConfig,
    max_rows: int,
    device: torch.device,
) -> Any:
    """A metadata builder that shares no buffer with the runner's.

    Args:
        backend: vLLM's attention backend of the layers.
        max_rows: most rows of one batch.
    """
    roomy = _for_eager_rows(vllm_config, max_rows)
    return backend.get_builder_cls()(kv_cache_spec, layer_names, roomy, device)


def build_rows(builder: Any, common: CommonAttentionMetadata, decoded: bool) -> Any:
    """The backend's metadata of the rows of a pass.

    Args:
        builder: a private one.
        decoded: rows are decodes of one token each.
    """
    if getattr(builder, "reorder_batch_threshold", None) is not None:
        # FlashInfer and the backends of MLA take short rows at the front of a batch for decodes,
        # and compute them by kernels of their own. Rows of a pass come in no such order: all are
        # decodes, or all are prefill.
        builder.reorder_batch_threshold = 1 if decoded else 0
    return builder.build(0, common)


def _for_eager_rows(vllm_config: VllmConfig, max_rows: int) -> VllmConfig:
    """The configuration with room for more rows and without CUDA graphs, in which a pass never runs
    and for which builders would set buffers aside. The original stays as it is."""
    from vllm.config import CUDAGraphMode

    changed = copy.copy(vllm_config)
    changed.scheduler_config = copy.copy(vllm_config.scheduler_config)
    changed.scheduler_config.max_num_seqs = max_rows
    changed.compilation_config = copy.copy(vllm_config.compilation_config)
    changed.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return changed
