# SPDX-License-Identifier: Apache-2.0
"""The wrapper of vLLM's stream generators watches their outputs, however they are passed."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_segreuse.compat.openai_streams import _reporting


@pytest.mark.parametrize("by_name", [True, False])
def test_report_is_found_in_the_outputs(by_name: bool) -> None:
    async def outputs() -> AsyncIterator[Any]:
        yield SimpleNamespace(finished=True, kv_transfer_params={"segreuse": {}})

    async def generator(
        self: Any, request: Any, result_generator: AsyncIterator[Any], request_id: str
    ) -> AsyncGenerator[str, None]:
        async for _ in result_generator:
            yield f'data: {{"id":"{request_id}","choices":[]}}\n\n'
        yield "data: [DONE]\n\n"

    async def collect() -> list[str]:
        generate = _reporting(generator)
        if by_name:
            events = generate(None, None, request_id="r", result_generator=outputs())
        else:
            events = generate(None, None, outputs(), "r")
        return [event async for event in events]

    first, last = asyncio.run(collect())
    assert json.loads(first.removeprefix("data: ")) == {
        "id": "r",
        "choices": [],
        "kv_transfer_params": {"segreuse": {}},
    }
    assert last == "data: [DONE]\n\n"


def test_generator_without_outputs_is_refused_when_it_is_wrapped() -> None:
    def generator(self: Any, request: Any) -> None: ...

    with pytest.raises(RuntimeError, match="result_generator"):
        _reporting(generator)
