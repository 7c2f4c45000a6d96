# SPDX-License-Identifier: Apache-2.0
"""An error of a feature costs the request its reuse, or ends reuse, and never the engine."""

from typing import Any

import pytest

from tests.parts import parts_of
from tests.test_scheduler import DOCUMENT, PROMPT, World


def failing(*_: Any) -> Any:
    raise ZeroDivisionError("the feature is wrong")


def reuses(world: World) -> int:
    request = world.add(PROMPT)
    world.run(request)
    return int(world.report(request)["reused_tokens"])


@pytest.mark.parametrize("hook", ["admit", "waits", "allocated"])
def test_an_error_about_a_request_costs_that_request_its_reuse(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.run(world.add(DOCUMENT))
    conversations = parts_of(world.side).feature["conversations"]
    with monkeypatch.context() as patch:
        patch.setattr(conversations, hook, failing)
        request = world.add(PROMPT)
        world.run(request)
    assert reuses(world) == len(DOCUMENT)
    assert not parts_of(world.side).health.broken


def test_an_error_over_the_index_keeps_features_from_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan is carried out, and some send along what it cannot be carried out without."""
    world, heard = World(), list[Any]()
    world.run(world.add(DOCUMENT))
    conversations = parts_of(world.side).feature["conversations"]
    request = world.add(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(world.side.parts.donors, "index_prefix", failing)
        patch.setattr(conversations, "allocated", heard.append)
        world.run(request)
    assert [admitted.tracked.plan for admitted in heard] == world.plans
    assert world.report(request)["reused_tokens"] == len(DOCUMENT)
    assert reuses(world) == len(DOCUMENT)
    assert not parts_of(world.side).health.broken


def test_an_error_at_the_end_of_a_step_ends_reuse_until_the_cache_is_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.run(world.add(DOCUMENT))
    assert reuses(world) == len(DOCUMENT)
    with monkeypatch.context() as patch:
        patch.setattr(parts_of(world.side).feature["conversations"], "end_step", failing)
        world.run(world.add(PROMPT))
    assert reuses(world) == 0
    world.pool.reset_prefix_cache()
    world.run(world.add(DOCUMENT))
    assert reuses(world) == len(DOCUMENT)


def test_an_error_over_a_message_ends_reuse_and_others_get_theirs() -> None:
    world = World()
    heard: list[Any] = []
    of = parts_of(world.side).feature
    of["audit"].reported, of["explain"].reported = failing, heard.append
    world.side.reported({"audit": "message", "explain": "another"}, {}, {})
    assert heard == ["another"]
    assert parts_of(world.side).health.broken
