# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, KV cache manager and block pool with our connector, and no model.

Everything on the scheduler's side is what a server runs; the connector is created by vLLM and
installs the block pool through its own hook. Whoever drives it stands for the workers: for each
step that the scheduler makes, `step_output` is what they would have returned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_segreuse.connector import SegReuseWorkerMetadata
from vllm_segreuse.plan import PlanOutcome

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class ModellessEngine:
    """The scheduler's process of one engine.

    Args:
        vllm_config: names our connector. Its cache is given the sizes below, which may be smaller
            than vLLM accepts from its users.
        num_blocks: KV blocks, with vLLM's null block, as vLLM counts `num_gpu_blocks`.
        block_size: tokens per block.

    Attributes:
        scheduler: vLLM's; the asynchronous one if `vllm_config` says so.
        pool: its blocks.
        side: the connector's half.
    """

    def __init__(self, vllm_config: VllmConfig, num_blocks: int, block_size: int) -> None:
        vllm_config.cache_config.block_size = block_size
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(block_size, hash_function)
        asynchronous = vllm_config.scheduler_config.async_scheduling
        kind = AsyncScheduler if asynchronous else Scheduler
        # The sizes of a layer matter where there is memory to be laid out only.
        layers = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.bfloat16
        )
        self.scheduler: Any = kind(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)],
            ),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=block_size,
            log_stats=True,
        )
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool
        self.side = self.scheduler.connector.scheduler_side

    def add(
        self, request_id: str, token_ids: list[int], params: SamplingParams, **others: Any
    ) -> Request:
        """A request arrives.

        Args:
            others: arguments of vLLM's `Request`, such as `cache_salt`.
        """
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._block_hasher,
            **others,
        )
        self.scheduler.add_request(request)
        return request


def step_output(
    sampled: Mapping[str, Sequence[int]],
    loaded: Collection[str] = (),
    outcomes: Mapping[str, PlanOutcome] | None = None,
) -> ModelRunnerOutput:
    """What the workers return of a step.

    Args:
        sampled: new tokens of each request of the step; none where its prompt is not done yet.
        loaded: requests whose spread plan is done, or dropped.
        outcomes: of plans that only the workers know the end of, by request.
    """
    ids = list(sampled)
    reported = SegReuseWorkerMetadata(dict(outcomes)) if outcomes else None
    connector = KVConnectorOutput(
        finished_recving=set(loaded) or None, kv_connector_worker_meta=reported
    )
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[list(sampled[request_id]) for request_id in ids],
        kv_connector_output=connector if loaded or reported else None,
    )
