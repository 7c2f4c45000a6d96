# SPDX-License-Identifier: Apache-2.0
"""Requests with extra keys are remembered, without their text, and not more of them than wanted."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from segreuse_extras.viewer.recent import MAX_EXPLAINED, Recent, watched, watching
from tests.explain.reports import REPORT
from tests.viewer.served import handle, outputs, run
from vllm_segreuse.compat.async_llm import _generate

PLAIN = {name: value for name, value in REPORT.items() if name != "explain"}


def params(**options: Any) -> Any:
    return SimpleNamespace(extra_args=options)


def test_a_request_is_running_and_then_finished_with_its_report() -> None:
    recent = Recent(3)

    async def steps() -> None:
        gate = asyncio.Event()
        watch = recent.watch("one", outputs(REPORT, gate))
        await anext(watch)
        [seen] = recent.latest()
        assert (seen.state, seen.report, seen.total_s) == ("running", None, None)
        assert seen.first_token_s is not None
        gate.set()
        assert (await anext(watch)).finished
        assert (seen.state, seen.report) == ("finished", REPORT)
        assert [item async for item in watch] == []
        assert seen.total_s is not None
        assert seen.total_s >= seen.first_token_s
        assert seen.is_explained

    run(steps())


def test_outputs_are_passed_on_as_they_are() -> None:
    async def both() -> tuple[list[Any], list[Any]]:
        given = [item async for item in outputs(REPORT)]

        async def again() -> Any:
            for item in given:
                yield item

        return given, [item async for item in Recent(1).watch("one", again())]

    given, passed = run(both())
    assert all(one is other for one, other in zip(given, passed, strict=True))


@pytest.mark.parametrize("error", [True, False])
def test_a_request_that_ends_early_has_stopped_and_the_engine_hears_of_it(error: bool) -> None:
    ended = []

    async def engine() -> Any:
        try:
            yield SimpleNamespace(kv_transfer_params=None, finished=False)
            raise RuntimeError("the engine")
        finally:
            ended.append(True)

    async def client() -> None:
        watch = recent.watch("one", engine())
        await anext(watch)
        if error:
            with pytest.raises(RuntimeError, match="the engine"):
                await anext(watch)
        else:
            await watch.aclose()  # the client has left
        assert ended == [True]

    recent = Recent(3)
    run(client())
    assert [seen.state for seen in recent.latest()] == ["stopped"]


def test_the_oldest_is_forgotten_first_and_numbers_are_never_used_again() -> None:
    recent = Recent(2)
    for name in "abc":
        handle(recent, name)
    assert [(seen.number, seen.request_id) for seen in recent.latest()] == [(3, "c"), (2, "b")]
    assert recent.get(1) is None
    assert recent.get(3) is not None


def test_only_the_latest_explanations_are_kept() -> None:
    recent = Recent(100, keeps_text=True)
    for i in range(MAX_EXPLAINED + 2):
        handle(recent, str(i), REPORT)
        handle(recent, f"{i} plain", PLAIN)
    explained = [seen for seen in recent.latest() if seen.is_explained]
    assert len(explained) == MAX_EXPLAINED
    first = recent.get(1)
    assert first is not None
    assert (first.report, first.token_ids) == (PLAIN, None)
    assert explained[-1].token_ids is not None
    assert "explain" in REPORT, "the client's own report stays as it is"


@pytest.mark.parametrize("keeps_text", [False, True])
def test_tokens_are_kept_only_where_that_is_wanted_and_the_prompt_is_explained(
    keeps_text: bool,
) -> None:
    recent = Recent(3, keeps_text)
    explained, plain = handle(recent, "one", REPORT), handle(recent, "two", PLAIN)
    assert (explained.token_ids is not None) is keeps_text
    assert plain.token_ids is None
    if explained.token_ids is not None:
        assert [*explained.token_ids] == [*range(2628)]


@pytest.mark.parametrize(
    ("options", "capacity", "count"),
    [
        ({"extra_keys": ["a"]}, 5, 1),
        ({"extra_keys": ["a"]}, 0, 0),
        ({}, 5, 0),
        ({"extra_keys": ["a"], "segreuse_freeze": "x"}, 5, 0),
        ({"extra_keys": ["a"], "segreuse_score": "x"}, 5, 0),
    ],
)
def test_what_is_watched(options: dict[str, Any], capacity: int, count: int) -> None:
    recent, given = Recent(capacity), outputs(REPORT)
    with watching(recent):
        found = watched("one", params(**options), given)
        assert (found is given) is (count == 0)

    async def drain() -> None:
        async for _ in found:
            pass

    run(drain())
    assert len(recent.latest()) == count
    assert watched("two", params(extra_keys=["a"]), given) is given, "nobody watches any more"


def test_the_patch_watches_what_vllm_generates() -> None:
    asked: list[Any] = []

    def original(self: Any, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> Any:
        asked.append((prompt, more))
        return outputs(REPORT)

    generate, recent = _generate(original, lambda *given: None, watched), Recent(3)

    async def drain() -> None:
        wanted = params(extra_keys=["a"])
        async for _ in generate(
            None, prompt="p", sampling_params=wanted, request_id="r", priority=1
        ):
            pass

    with watching(recent):
        run(drain())
    assert asked == [("p", {"priority": 1})]
    assert [seen.request_id for seen in recent.latest()] == ["r"]
