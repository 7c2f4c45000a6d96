# SPDX-License-Identifier: Apache-2.0
"""The wrapper of vLLM's stream generators watches their outputs, however they are passed."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trained.test_layout import CONFIG
from vllm_segreuse.compat.openai_streams import _reporting
from vllm_segreuse.serve.report import report_of

ASKED = SimpleNamespace(vllm_xargs={"extra_keys": ["team"]})


def server(**of_model: Any) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(**of_model)))


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
        generate = _reporting(generator, report_of)
        if by_name:
            events = generate(server(), ASKED, request_id="r", result_generator=outputs())
        else:
            events = generate(server(), ASKED, outputs(), "r")
        return [event async for event in events]

    first, last = asyncio.run(collect())
    assert json.loads(first.removeprefix("data: ")) == {
        "id": "r",
        "choices": [],
        "kv_transfer_params": {"segreuse": {}},
    }
    assert last == "data: [DONE]\n\n"


@pytest.mark.parametrize("xargs", [None, {}, {"extra_keys": None}, {"top_p": 1}])
def test_stream_that_has_no_report_is_vllms_own(xargs: Any) -> None:
    calls = []

    def generator(self: Any, request: Any, result_generator: Any, request_id: str) -> Any:
        calls.append((self, request, result_generator, request_id))
        return "events"

    here, request, outputs = server(), SimpleNamespace(vllm_xargs=xargs), object()
    events = _reporting(generator, report_of)(here, request, outputs, request_id="r")
    assert events == "events"
    assert calls == [(here, request, outputs, "r")]


def test_model_trained_on_documents_alone_reports_without_extra_keys() -> None:
    def generator(self: Any, request: Any, result_generator: Any) -> Any:
        return result_generator

    here, request = server(segreuse=CONFIG), SimpleNamespace(vllm_xargs=None)
    assert isinstance(_reporting(generator, report_of)(here, request, object()), AsyncGenerator)


@pytest.mark.parametrize("missing", ["result_generator", "request"])
def test_generator_without_what_is_watched_is_refused_when_it_is_wrapped(missing: str) -> None:
    def without_outputs(self: Any, request: Any) -> None: ...
    def without_request(self: Any, result_generator: Any) -> None: ...

    with pytest.raises(RuntimeError, match=f"see the {missing} of"):
        _reporting(without_request if missing == "request" else without_outputs, report_of)
