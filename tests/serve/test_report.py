# SPDX-License-Identifier: Apache-2.0
"""A stream's last chunk before [DONE] carries the report; everything else passes untouched."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_segreuse.serve.report import StreamReport, has_report, report_of

DONE = "data: [DONE]\n\n"
REPORT = {"segreuse": {"policy": "shift", "reused_tokens": 7}}


def output(finished: bool = False, params: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(finished=finished, kv_transfer_params=params)


def chunk(text: str, finish: str | None = None) -> str:
    body = {"choices": [{"text": text, "finish_reason": finish}]}
    return f"data: {json.dumps(body)}\n\n"


USAGE = 'data: {"choices":[],"usage":{"total_tokens":9}}\n\n'


async def as_stream(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def run(
    outputs: list[Any], *, usage: bool = False, error: bool = False, reports: bool = False
) -> list[str]:
    """A generator like vLLM's: one chunk per output, then usage, then [DONE].

    Args:
        reports: it puts the report where a choice is finished, as vLLM 0.33 does.
    """

    async def vllm(report: StreamReport) -> AsyncGenerator[str, None]:
        async for item in report.watch(as_stream(outputs)):
            out = item[1] if isinstance(item, tuple) else item
            event = chunk("x", "length" if out.finished else None)
            if reports:
                params = json.dumps(out.kv_transfer_params if out.finished else None)
                event = event.replace("}\n\n", f',"kv_transfer_params":{params}}}\n\n')
            yield event
        if error:
            yield 'data: {"error":{"message":"boom"}}\n\n'
        if usage:
            yield USAGE
        yield DONE

    async def collect() -> list[str]:
        report = StreamReport(len({item[0] for item in outputs if isinstance(item, tuple)}) or 1)
        return [event async for event in report.complete(vllm(report))]

    return asyncio.run(collect())


def params_of(events: list[str]) -> list[Any]:
    return [
        json.loads(event.removeprefix("data: ")).get("kv_transfer_params")
        for event in events
        if event != DONE
    ]


def test_finish_chunk_carries_the_report() -> None:
    events = run([output(), output(), output(True, REPORT)])
    assert params_of(events) == [None, None, REPORT]
    assert events[:2] == [chunk("x")] * 2
    assert events[-1] == DONE


def test_usage_chunk_carries_it_if_there_is_one() -> None:
    events = run([output(), output(True, REPORT)], usage=True)
    assert params_of(events) == [None, None, REPORT]
    assert events[1] == chunk("x", "length")
    assert json.loads(events[2].removeprefix("data: "))["usage"] == {"total_tokens": 9}


@pytest.mark.parametrize("usage", [False, True])
def test_a_chunk_that_has_the_report_from_vllm_gets_no_second_one(usage: bool) -> None:
    *chunks, last, _ = run([output(), output(True, REPORT)], usage=usage, reports=True)
    assert [event.count("kv_transfer_params") for event in (*chunks, last)] == [1] * (2 + usage)
    assert params_of([last]) == [REPORT]


def test_stream_without_a_report_passes_byte_for_byte() -> None:
    events = run([output(), output(True)], usage=True)
    assert events == [chunk("x"), chunk("x", "length"), USAGE, DONE]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_prompts_end_with_the_report_of_the_first(order: tuple[int, int]) -> None:
    reports = {0: REPORT, 1: {"segreuse": {"policy": "shift", "reused_tokens": 1}}}
    outputs = [each for i in order for each in ((i, output()), (i, output(True, reports[i])))]
    assert params_of(run(outputs)) == [None, None, None, REPORT]


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_chunk_of_a_prompt_does_not_wait_for_another_prompt(first: int) -> None:
    async def scenario() -> None:
        report, gate = StreamReport(2), asyncio.Event()

        async def outputs() -> AsyncIterator[Any]:
            yield first, output(True, REPORT)
            await gate.wait()
            yield 1 - first, output(True, REPORT)

        async def vllm() -> AsyncGenerator[str, None]:
            async for _ in report.watch(outputs()):
                yield chunk("x", "length")
            yield DONE

        events = report.complete(vllm())
        assert await asyncio.wait_for(anext(events), 5) == chunk("x", "length")
        gate.set()
        assert params_of([event async for event in events]) == [REPORT]

    asyncio.run(scenario())


def test_report_of_a_choice_that_finished_earlier_is_kept() -> None:
    outputs = [output(False, REPORT), output(), output(True)]
    assert params_of(run(outputs)) == [None, None, REPORT]


def test_error_event_stays_as_it_is() -> None:
    events = run([output(True, REPORT)], error=True)
    assert events[1] == 'data: {"error":{"message":"boom"}}\n\n'
    assert params_of(events) == [None, None]


def test_chunks_before_the_last_output_are_not_held_back() -> None:
    async def scenario() -> None:
        report = StreamReport(1)
        gate = asyncio.Event()

        async def outputs() -> AsyncIterator[Any]:
            yield output()
            await gate.wait()
            yield output(True, REPORT)

        async def vllm() -> AsyncGenerator[str, None]:
            async for out in report.watch(outputs()):
                yield chunk("x", "length" if out.finished else None)
            yield DONE

        events = report.complete(vllm())
        assert await asyncio.wait_for(anext(events), 5) == chunk("x")
        gate.set()
        assert params_of([event async for event in events]) == [REPORT]

    asyncio.run(scenario())


def test_closing_early_closes_vllms_generator() -> None:
    closed = []

    async def scenario() -> None:
        report = StreamReport(1)

        async def vllm() -> AsyncGenerator[str, None]:
            try:
                while True:
                    yield chunk("x")
            finally:
                closed.append(True)

        events = report.complete(vllm())
        await anext(events)
        await events.aclose()

    asyncio.run(scenario())
    assert closed == [True]


@pytest.mark.parametrize("says", [None, {"segreuse": {}}], ids=["ordinary", "with a layout"])
@pytest.mark.parametrize(
    ("xargs", "has_keys"),
    [
        (None, False),
        ({}, False),
        ({"extra_keys": None}, False),
        ({"other": 1}, False),
        ({"extra_keys": ["a"]}, True),
        ({"extra_keys": ""}, True),
    ],
)
def test_who_has_extra_keys_or_a_model_with_a_layout_may_have_a_report(
    xargs: Any, has_keys: bool, says: Any
) -> None:
    request = SimpleNamespace(vllm_xargs=xargs)
    model = SimpleNamespace(hf_config=SimpleNamespace(segreuse=says))
    assert has_report(request, model) is (has_keys or says is not None)
    assert (report_of(request, model, 1) is not None) is (has_keys or says is not None)


def completed(*events: str, params: Any = REPORT) -> list[str]:
    """What becomes of events behind the only output."""

    async def collect() -> list[str]:
        report = StreamReport(1)

        async def vllm() -> AsyncGenerator[str, None]:
            async for _ in report.watch(as_stream([output(True, params)])):
                pass
            for event in events:
                yield event

        return [event async for event in report.complete(vllm())]

    return asyncio.run(collect())


def test_a_stream_that_breaks_off_passes_as_it_is() -> None:
    assert completed() == []
    assert completed(chunk("x")) == [chunk("x")]
    assert completed(chunk("x"), USAGE) == [chunk("x"), USAGE]
    assert completed(DONE) == [DONE]


@pytest.mark.parametrize(
    "last",
    ['data: ["choices"]\n\n', 'data: {"choices": []}\n', 'data: {"other": {}}\n\n', ": ping\n\n"],
)
def test_what_is_no_chunk_passes_as_it_is(last: str) -> None:
    assert completed(chunk("x"), last, DONE) == [chunk("x"), last, DONE]


def test_a_report_is_written_without_spaces_behind_all_else() -> None:
    [last, done] = completed(USAGE, DONE)
    assert (last, done) == (
        'data: {"choices":[],"usage":{"total_tokens":9},"kv_transfer_params":{"segreuse":'
        '{"policy":"shift","reused_tokens":7}}}\n\n',
        DONE,
    )
    assert completed(USAGE, DONE, params=None) == [USAGE, DONE]
