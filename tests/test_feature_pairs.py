# SPDX-License-Identifier: Apache-2.0
"""What holds where two features meet in one request; the table is in docs/architecture.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from segreuse_extras.compressed.orders import ScoreOrder
from segreuse_extras.context.finder import SameContextFinder
from segreuse_extras.trained.finder import IsolatedDocument
from tests.parts import parts_of
from tests.test_isolated_requests import LAYOUT
from tests.test_isolated_requests import PROMPT as WITH_DOCUMENT
from tests.test_scheduler import DOCUMENT, OPTIONS, PROMPT, SIZE, World
from tests.test_scheduler_images import BEHIND, FRONT, A, Pictured
from tests.tier.fakes import Region
from vllm_segreuse.features.knowledge.frozen import FrozenPart
from vllm_segreuse.options.parsing import FREEZE, SCORE
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.scheduling.tracked import Bypass, TrackedRequest, Use

ONCE = OPTIONS | {"segreuse_policy": "focus", "segreuse_recompute_once": True}
TIER: dict[str, Any] = {"tier": {"host_gib": 1, "min_run_tokens": SIZE}}


def arrived(world: World, tokens: list[int], options: Any = OPTIONS, **fields: Any) -> Any:
    """What is known of a request that has arrived."""
    tracked = parts_of(world.side).planner.get(world.add(tokens, options, **fields).request_id)
    assert tracked is not None
    return tracked


def continues(world: World, tracked: TrackedRequest) -> bool:
    """Whether it takes what an earlier turn has moved."""
    return parts_of(world.side).conversations.found in tracked.method.left_behind


def test_no_image_is_told_apart_where_documents_are_found_by_their_tokens() -> None:
    assert World().side.parts.features.named("images") is not None
    with pytest.raises(LookupError, match="does without 'images'"):
        World(layout=LAYOUT).side.parts.features.named("images")


def test_documents_of_a_trained_model_and_a_bypass_end_the_request() -> None:
    world = World(layout=LAYOUT)
    request = world.add(WITH_DOCUMENT, OPTIONS, sampling={"prompt_logprobs": 1})
    assert world.side.match(request, 0) == (None, False), "it does not run as it is"
    assert world.side.take_failed() == [request.request_id]


def test_documents_without_extra_keys_are_in_a_private_namespace() -> None:
    world = World(layout=LAYOUT, region=Region(16), **TIER)
    mine, other = arrived(world, WITH_DOCUMENT, None), arrived(world, WITH_DOCUMENT, None)
    assert mine.mode is Use.REQUIRE
    assert not mine.donates
    assert not mine.restores
    assert mine.prompt.namespace != other.prompt.namespace
    named = arrived(world, WITH_DOCUMENT)
    assert named.donates, "others of its namespace may know its text"
    assert not named.restores


def test_an_order_to_compress_overrides_a_bypass() -> None:
    order = {SCORE: ScoreOrder(2, 3 * SIZE, 4).encode()}
    freeze = {FREEZE: FreezeOrder("doc", 0, 1, 0).encode()}
    tracked = arrived(World(), [*DOCUMENT, 1], OPTIONS | order | freeze)
    assert tracked.mode is Use.REQUIRE
    assert arrived(World(), [*DOCUMENT, 1], OPTIONS | freeze).bypass == "knowledge_base"


def test_prompts_with_images_restore_nothing() -> None:
    world = Pictured(region=Region(16), **TIER)
    planner = parts_of(world.side).planner
    pictured, plain = (
        planner.get(world.arrive(*parts).request_id) for parts in ((FRONT, A, BEHIND), (FRONT,))
    )
    assert pictured is not None
    assert plain is not None
    assert (pictured.restores, plain.restores) == (False, True)
    assert pictured.method.work is None, "nothing of what was found is left out"


@pytest.mark.parametrize("other", [{"segreuse_policy": "exact"}, {"segreuse_documents": ["a/b"]}])
def test_what_reuses_no_moved_text_takes_no_earlier_turn(other: dict[str, Any]) -> None:
    world = World()
    assert continues(world, arrived(world, PROMPT, ONCE))
    assert not continues(world, arrived(world, PROMPT, ONCE | other))


def test_an_equal_prompt_goes_before_an_earlier_turn() -> None:
    world = World()
    both, equal = arrived(world, PROMPT, ONCE), arrived(world, PROMPT)
    assert len(equal.method.left_behind) == 1
    assert len(both.method.left_behind) == 2
    assert both.method.left_behind[1] == parts_of(world.side).conversations.found


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"segreuse_policy": "exact"}, {}),
        ({"segreuse_documents": ["a/b"]}, {}),
        ({}, {"sampling": {"prompt_logprobs": 1}}),
        ({}, {"resumable": True}),
    ],
)
def test_some_equal_prompts_are_carried_out_one_by_one(options: Any, fields: Any) -> None:
    world = World()
    assert arrived(world, PROMPT, OPTIONS).method.left_behind
    assert not arrived(world, PROMPT, OPTIONS | options, **fields).method.left_behind


def test_equal_prompts_of_a_namespace_that_has_drifted_are_carried_out_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(audit={"fallback": {"policy": "focus"}})
    monkeypatch.setattr(parts_of(world.side).audits, "falls_back", lambda _: True)
    assert not arrived(world, PROMPT).method.left_behind


@pytest.mark.parametrize("fallback", [{"policy": "focus"}, "bypass"])
def test_a_namespace_that_has_drifted_takes_no_earlier_turn(
    fallback: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(audit={"fallback": fallback} if fallback != "bypass" else {})
    monkeypatch.setattr(parts_of(world.side).audits, "falls_back", lambda _: True)
    tracked = arrived(world, PROMPT, ONCE)
    assert not continues(world, tracked)
    assert (tracked.bypass == "fallback") is (fallback == "bypass")


def test_what_the_tier_has_of_the_exact_prefix_goes_before_an_earlier_turn() -> None:
    world = World(region=Region(64), min_reused_tokens=SIZE, **TIER)
    turn = [7, *DOCUMENT, *range(8, 19)]
    world.run(world.add(DOCUMENT, ONCE))
    world.run(world.add(turn, ONCE | {"segreuse_policy": "shift"}))
    world.run(world.add([*turn, 1, 2], ONCE))
    assert world.taken == len(turn)
    exact = world.add(turn, ONCE | {"segreuse_recompute_ratio": 1.0})
    parts_of(world.side).planner.remove(exact.request_id)
    world.pool.cache_full_blocks(exact, world.pool.get_new_blocks(1), 0, 1, SIZE, 0)
    world.side.take_step(True)
    again = world.add([*turn, 1, 2], ONCE)
    assert not world.pool.left_behind(again.request_id, 0, len(turn))
    assert world.pool.left_behind(again.request_id, SIZE, len(turn)), "behind it, there is more"


def test_a_documents_context_does_not_donate() -> None:
    freeze = {FREEZE: FreezeOrder("doc", 0, 1, 2 * SIZE).encode()}
    world = World()
    tracked = arrived(world, DOCUMENT, OPTIONS | freeze)
    depths = parts_of(world.side).donors.depths(tracked, 0, len(DOCUMENT) // SIZE)
    assert np.flatnonzero(depths < 0).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("options", "restores"),
    [
        ({FREEZE: FreezeOrder("doc", 0, 1, 0).encode()}, True),
        ({FREEZE: FreezeOrder("doc", 0, 1, 0).encode(), "segreuse_observe": True}, False),
        ({}, True),
    ],
)
def test_who_computes_in_full_may_still_be_restored(
    options: dict[str, Any], restores: bool
) -> None:
    world = World(region=Region(16), **TIER)
    assert arrived(world, DOCUMENT, OPTIONS | options).restores is restores
    plain = arrived(world, DOCUMENT, sampling={"prompt_logprobs": 1})
    assert plain.mode == Bypass("prompt_logprobs")
    assert not plain.restores


def test_an_error_of_a_feature_never_lets_a_request_run_without_its_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(layout=LAYOUT)
    request = world.add(WITH_DOCUMENT, OPTIONS)
    assert world.side.match(request, 0) == (None, False), "its document is computed first"
    trained: Any = parts_of(world.side).feature["trained"]
    monkeypatch.setattr(trained.requests, "waits", lambda *_: False)
    monkeypatch.setattr(trained, "decided", lambda *_: 1 / 0)
    assert world.side.match(request, 0) == (None, False)
    monkeypatch.undo()
    assert world.side.match(request, 0) == (None, False)
    assert world.side.take_failed() == [request.request_id]


def test_what_features_hold_for_a_request_ends_with_it_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(layout=LAYOUT)
    request = world.add(WITH_DOCUMENT, OPTIONS)
    assert parts_of(world.side).isolated.has_documents(request.request_id)
    monkeypatch.setattr(world.side.parts.planner, "remove", lambda _: 1 / 0)
    assert world.side.finished(request, []) is None
    assert not parts_of(world.side).isolated.has_documents(request.request_id)


def test_a_reset_releases_frozen_documents_that_are_held_for_a_waiting_request() -> None:
    world = World(layout=LAYOUT)
    request = world.add(DOCUMENT)
    (block,) = world.pool.get_new_blocks(1)
    world.pool.cache_full_blocks(request, [block], 0, 1, SIZE, 0)
    world.side.take_step(True)
    found = np.array([block.block_id], np.int32)
    document = IsolatedDocument(0, SIZE, tuple(DOCUMENT[:SIZE]), lambda: found)
    assert parts_of(world.side).isolated.cold.wait_for("waits", request, b"mine", [document], 2)
    namespace = parts_of(world.side).namespaces.intern(b"mine")
    part = FrozenPart(namespace, [block.block_id], None)
    assert parts_of(world.side).entries.add(FreezeOrder("doc", 0, 1, 0), part)
    world.side.finished(request, [])
    world.pool.free_blocks([block])
    assert world.pool.reset_prefix_cache()
    assert parts_of(world.side).entries.warm() == {}


SAME = OPTIONS | {"segreuse_context": "same"}


def test_nothing_that_an_earlier_turn_has_moved_is_reused_in_the_same_context_only() -> None:
    world = World()
    mine = arrived(world, PROMPT, ONCE | SAME)
    assert not continues(world, mine)
    assert isinstance(mine.method.finder, SameContextFinder)
    assert not isinstance(arrived(world, PROMPT, ONCE).method.finder, SameContextFinder)
    exact = arrived(world, PROMPT, SAME | {"segreuse_policy": "exact"})
    assert not isinstance(exact.method.finder, SameContextFinder)


def test_documents_of_a_trained_model_are_found_whatever_was_in_front_of_them() -> None:
    world = World(layout=LAYOUT)
    mine, plain = arrived(world, WITH_DOCUMENT, SAME), arrived(world, WITH_DOCUMENT)
    assert type(mine.method.finder) is type(plain.method.finder)


@pytest.mark.parametrize("options", [SAME, OPTIONS], ids=["same", "any"])
def test_what_is_refused_for_its_context_is_explained_as_such(options: Any) -> None:
    """And the edit behind which it stands is named: so many tokens stand behind it as before."""
    world = World()
    cached = [*range(50, 50 + 2 * SIZE), *DOCUMENT]
    world.run(world.add(cached, OPTIONS))
    edited = [*cached[:SIZE], 9, *DOCUMENT, 8]
    request = world.add(edited, options | {"segreuse_explain": True})
    assert not world.match(request, SIZE) or options is OPTIONS
    world.side.allocated(request, [block.block_id for block in world.pool.get_new_blocks(12)])
    report = world.report(request)
    _, *behind, _ = [(it["tokens"], it.get("reason", it["source"])) for it in report["explain"]]
    kept = [(1, "shorter_than_block"), (len(DOCUMENT), "segment")]
    assert behind == ([(1 + len(DOCUMENT), "other_context")] if options is SAME else kept)
    assert report["edit"] == {
        "at": SIZE,
        "gone_tokens": SIZE,
        "new_tokens": 1,
        "found_tokens": len(DOCUMENT),
    }


def test_what_is_not_reused_in_another_context_is_reported_and_counted() -> None:
    world = World()
    first = world.add(DOCUMENT, OPTIONS)
    world.run(first)
    for options, refused in ((SAME, 2 * SIZE), (OPTIONS, None)):
        # The document's first block is gone, and with it all that its others were read behind.
        request = world.add([7] * SIZE + DOCUMENT[SIZE : 3 * SIZE] + [8], options)
        world.run(request)
        request.num_preemptions += 1
        request.append_output_token_ids([*DOCUMENT[SIZE : 3 * SIZE]])
        world.run(request)  # what is found then is no part of its report
        report = world.report(request)
        assert report.get("other_context_tokens") == refused
        assert (report["reused_tokens"] > 0) is (refused is None)
    assert world.stats.data["other_context_tokens_total"] == 2 * SIZE
