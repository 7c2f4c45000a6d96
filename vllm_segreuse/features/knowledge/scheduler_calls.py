# SPDX-License-Identifier: Apache-2.0
"""Calls into the scheduler's process: from an API server, and from a program with `vllm.LLM`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from vllm_segreuse.features.knowledge.errors import UnavailableError


def call_scheduler_of(llm: Any, method: str, *args: Any) -> Any:
    """As `call_scheduler`, of a `vllm.LLM`, whose engine may be in this very process."""
    client = llm.llm_engine.engine_core
    if hasattr(client, "call_utility"):  # the engine has a process of its own
        return client.call_utility(method, *args)
    return getattr(client.engine_core, method)(*args)


async def call_scheduler(engine_client: Any, method: str, *args: Any) -> Any:
    """Calls a method that `compat/engine_core.py` has added, between two steps.

    Raises:
        UnavailableError: there is no engine any more.
    """
    return await _called(engine_client.engine_core.call_utility_async(method, *args))


async def call_schedulers(engine_client: Any, method: str, *args: Any) -> list[Any]:
    """The same of every engine; what each answers, in order.

    Raises:
        UnavailableError: one of them has stopped.
    """
    return list(await _called(engine_client.engine_core.call_utility_all_async(method, *args)))


async def _called(call: Awaitable[Any]) -> Any:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return await call
    except EngineDeadError as error:
        raise UnavailableError("the engine has stopped") from error
