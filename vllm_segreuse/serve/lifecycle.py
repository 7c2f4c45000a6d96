# SPDX-License-Identifier: Apache-2.0
"""What an API server of ours needs from its first request to its last."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from vllm.logger import init_logger

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.features.knowledge.engine import ServedEngine
from vllm_segreuse.features.knowledge.origin import serving_clients
from vllm_segreuse.features.knowledge.parallel import ParallelEngines
from vllm_segreuse.features.knowledge.service import KnowledgeService, start_service
from vllm_segreuse.serve.front import fronts

logger = init_logger("vllm.segreuse")


@asynccontextmanager
async def serving(app: FastAPI, admin: FastAPI | None) -> AsyncIterator[None]:
    """Around the time in which vLLM's application serves.

    Args:
        app: vLLM's; its state has the engine client.
        admin: the administrator's (`admin.py`), or None.
    """
    client = app.state.engine_client
    if client is None:  # vLLM's server that only renders prompts
        yield
        return
    config = SegReuseConfig.from_options(
        client.vllm_config.kv_transfer_config.kv_connector_extra_config
    )
    app.state.segreuse_namespaces = config.namespaces
    app.state.segreuse_model = client.vllm_config.model_config
    with serving_clients():
        if admin is None:
            yield
            return
        admin.state.server = app
        async with _administered(admin, client, config):
            yield


@asynccontextmanager
async def _administered(admin: FastAPI, client: Any, config: SegReuseConfig) -> AsyncIterator[None]:
    admin.state.engine_client = client
    admin.state.max_body_bytes = config.knowledge_body_bytes
    admin.state.service = service = await _start_service(client, config)
    admin.state.server.state.segreuse_service = service
    try:
        with ExitStack() as around:
            for front in fronts():
                around.enter_context(front.serving(admin, config))
            yield
    finally:
        if service is not None:
            await service.close()


async def _start_service(client: Any, config: SegReuseConfig) -> KnowledgeService | None:
    parallel = client.vllm_config.parallel_config
    engines = parallel.data_parallel_size
    # With a balancer in front of vLLM, each API server has some of the engines only.
    if parallel._api_process_count > 1 or len(client.engine_core.core_engines) != engines:
        logger.warning("segment reuse: no knowledge bases with several API servers")
        return None
    engine = ServedEngine(client) if engines == 1 else ParallelEngines(client, engines)
    return await start_service(engine, client.vllm_config, config, in_background=True)
