# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool with two names per block: what is exact keeps vLLM's, all else has one that
nobody can ask for; the index knows what is computed, and forgets what is gone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.request import Request

from tests.compat.managed import OPTIONS, SIZE, Managed, ids, plan_of
from tests.parts import parts_of
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.compat.block_events import BlockListener, PrefixState
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.options.server import MAX_PROVENANCE_DEPTH
from vllm_segreuse.plan import FreezeOrder
from vllm_segreuse.scheduling.exact_names import ExactNames

DOCUMENT = [*range(100, 100 + 4 * SIZE)]
Patch = pytest.MonkeyPatch


@pytest.fixture
def managed() -> Managed:
    return Managed()


def exact(managed: Managed, request: Any) -> list[int]:
    """Which of a request's blocks vLLM finds by their exact names."""
    found = [managed.pool.get_cached_block(name, [0]) for name in request.block_hashes]
    return [i for i, cached in enumerate(found) if cached is not None]


# Names.


@pytest.mark.parametrize(
    ("start", "named"), [(0, []), (SIZE, [0]), (2 * SIZE, [0, 1]), (4 * SIZE, [0, 1, 2, 3])]
)
def test_blocks_are_exact_up_to_a_plans_start(
    start: int, named: list[int], managed: Managed
) -> None:
    request = managed.request(DOCUMENT)
    managed.tracked(request).plan = plan_of(request, start)
    blocks = managed.named(request)
    assert exact(managed, request) == named
    assert all(block.block_hash is not None for block in blocks), "it would be evicted first"


def test_what_follows_a_plan_is_as_approximate_as_the_plan(managed: Managed) -> None:
    """The blocks of the answer are named later, from where the prompt's blocks end."""
    request = managed.request([*DOCUMENT, 1, 2, 3, 4])
    managed.tracked(request).plan = plan_of(request, SIZE)
    blocks = managed.pool.get_new_blocks(5)
    managed.pool.cache_full_blocks(request, blocks, 0, 4, SIZE, 0)
    managed.pool.cache_full_blocks(request, blocks, 4, 5, SIZE, 0)
    assert exact(managed, request) == [0]


@pytest.mark.parametrize(("start", "named"), [(0, False), (3 * SIZE, False), (4 * SIZE, True)])
def test_a_state_behind_what_is_exact_is_named_once(
    start: int, named: bool, managed: Managed
) -> None:
    """vLLM names the state at the last boundary of a prompt by itself."""
    request = managed.request(DOCUMENT)
    managed.tracked(request).plan = plan_of(request, start)
    [block] = managed.pool.get_new_blocks(1)
    found = managed.pool.cache_partial_block(request, block, 4 * SIZE, 1, SIZE)
    assert (found is not None) == named
    assert (managed.pool.state_at(request, 4 * SIZE, 1) is block) == named
    assert managed.pool.state_at(request, 2 * SIZE, 1) is None
    others = managed.request(DOCUMENT, None)
    assert managed.pool.cache_partial_block(others, block, 4 * SIZE, 1, SIZE) is not None


def test_blocks_of_states_are_counted_beside_those_of_tokens(managed: Managed) -> None:
    """Two in each group: of what a plan supplies, and of what is computed behind it."""
    request = managed.request(DOCUMENT)
    alone = managed.pool.prefix_state(request, 0, 4 * SIZE, 0).blocks_needed
    managed.pool.group = replace(managed.pool.group, states=(1, 2))
    assert managed.pool.prefix_state(request, 0, 4 * SIZE, 0).blocks_needed == alone + 4


def test_blocks_without_their_states_are_not_taken_of_earlier_turns(
    managed: Managed, monkeypatch: Patch
) -> None:
    blocks, request = managed.computed(DOCUMENT), managed.request(DOCUMENT)
    monkeypatch.setattr(managed.pool._naming, "left_behind", lambda *_: ids(blocks))
    assert managed.pool.left_behind(request.request_id, 0, 4 * SIZE) == blocks
    managed.pool.group = replace(managed.pool.group, states=(1,))
    assert managed.pool.left_behind(request.request_id, 0, 4 * SIZE) == []


def test_names_of_approximate_blocks_are_never_the_same(managed: Managed) -> None:
    """One of two blocks of a name would stay found when the other is evicted."""
    names = []
    for _ in range(2):
        request = managed.request(DOCUMENT)
        managed.tracked(request).plan = plan_of(request, 0)
        names += [block.block_hash for block in managed.named(request)]
    assert len(set(names)) == len(names) == 8


def test_requests_without_keys_or_a_plan_are_named_as_vllm_does(managed: Managed) -> None:
    for options in (None, OPTIONS):
        request = managed.request(DOCUMENT, options)
        managed.named(request)
        assert exact(managed, request) == [0, 1, 2, 3]


def test_events_tell_of_exact_blocks_only() -> None:
    managed = Managed(enable_kv_cache_events=True)
    request = managed.request(DOCUMENT)
    managed.tracked(request).plan = plan_of(request, 2 * SIZE)
    blocks = managed.named(request)
    managed.side.take_step(True)
    managed.pool.free_blocks(blocks)
    managed.pool.evict_blocks(set(ids(blocks)))
    stored, *removed = managed.pool.take_events()
    names = [maybe_convert_block_hash(name) for name in request.block_hashes[:2]]
    assert stored.block_hashes == names
    assert sorted(name for event in removed for name in event.block_hashes) == sorted(names)


# The index.


def test_exact_blocks_donate_until_they_are_evicted(managed: Managed) -> None:
    blocks = managed.computed(DOCUMENT)
    assert [block in managed.index for block in ids(blocks)] == [True] * 4
    managed.pool.evict_blocks({blocks[1].block_id})
    assert [block in managed.index for block in ids(blocks)] == [True, False, True, True]


def inserted(managed: Managed, patch: Patch) -> list[dict[str, Any]]:
    """What the index is given from here on."""
    calls: list[dict[str, Any]] = []

    def insert(namespace: int, blocks: Any, tokens: Any, position: int, **given: Any) -> None:
        calls.append(
            {
                "blocks": blocks.tolist(),
                "tokens": tokens.tolist(),
                "position": position,
                "parent": given["parent_block"],
                "depths": np.broadcast_to(given["depths"], len(blocks)).tolist(),
            }
        )

    patch.setattr(managed.index, "insert", insert)
    return calls


def with_depths(managed: Managed, depths: list[int], patch: Patch) -> None:
    given = np.array(depths, np.int32)
    patch.setattr(
        managed.donors,
        "depths",
        lambda tracked, first, count: given[first : first + count],
    )


def test_a_block_that_may_not_donate_ends_a_run(managed: Managed, monkeypatch: Patch) -> None:
    calls = inserted(managed, monkeypatch)
    with_depths(managed, [0, -1, 2, 3], monkeypatch)
    a, b, c, d = ids(managed.named(managed.request(DOCUMENT)))
    assert calls == [
        {"blocks": [a], "tokens": DOCUMENT[:SIZE], "position": 0, "parent": -1, "depths": [0]},
        {
            "blocks": [c, d],
            "tokens": DOCUMENT[2 * SIZE :],
            "position": 2 * SIZE,
            "parent": b,
            "depths": [2, 3],
        },
    ]


def test_blocks_that_are_named_later_go_on_from_those_before(
    managed: Managed, monkeypatch: Patch
) -> None:
    calls = inserted(managed, monkeypatch)
    request = managed.request(DOCUMENT)
    blocks = managed.pool.get_new_blocks(4)
    managed.pool.cache_full_blocks(request, blocks, 0, 2, SIZE, 0)
    managed.pool.cache_full_blocks(request, blocks, 2, 4, SIZE, 0)
    assert [(each["position"], each["parent"]) for each in calls] == [
        (0, -1),
        (2 * SIZE, blocks[1].block_id),
    ]


def test_no_block_donates_that_is_deeper_than_the_index_can_store(
    managed: Managed, monkeypatch: Patch
) -> None:
    """128 would be -128, and taken for less than exact."""
    with_depths(managed, [MAX_PROVENANCE_DEPTH, MAX_PROVENANCE_DEPTH + 1, 255, 0], monkeypatch)
    request = managed.request(DOCUMENT)
    blocks = ids(managed.named(request))
    assert [block in managed.index for block in blocks] == [True, False, False, True]
    assert managed.tracked(request).donates


def test_the_deepest_that_is_stored_is_told_as_it_is(managed: Managed) -> None:
    deep = np.full(2, MAX_PROVENANCE_DEPTH, np.int8)
    managed.index.insert(0, np.array([1, 2]), np.arange(2 * SIZE), 0, depths=deep)
    assert managed.index.nodes["depth"].max() == MAX_PROVENANCE_DEPTH


@pytest.mark.parametrize("silent", ["donates", "broken"])
def test_who_may_not_donate_is_not_indexed(silent: str, managed: Managed) -> None:
    request = managed.request(DOCUMENT)
    if silent == "donates":
        managed.tracked(request).donates_nothing()
    else:
        managed.health.broken = True
    blocks = managed.named(request)
    managed.donors.index_prefix(managed.tracked(request), request.all_token_ids, ids(blocks))
    assert len(managed.index) == 0
    assert exact(managed, request) == [0, 1, 2, 3]


def test_an_error_of_the_index_ends_the_donations_of_one_request(
    managed: Managed, monkeypatch: Patch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(managed.index, "insert", fail)
        request = managed.request(DOCUMENT)
        managed.named(request)
    assert exact(managed, request) == [0, 1, 2, 3], "vLLM's own names do not depend on us"
    assert not managed.tracked(request).donates
    assert not managed.health.broken
    other = managed.request([*range(4)])
    managed.named(other)
    assert len(managed.index) == 1


def test_a_prefix_donates_in_the_namespace_that_meets_it(
    managed: Managed, monkeypatch: Patch
) -> None:
    blocks = ids(managed.computed(DOCUMENT))
    other = managed.request(DOCUMENT, OPTIONS | {"extra_keys": "others"})
    tracked = managed.tracked(other)
    assert managed.index.missing(tracked.prompt.namespace, np.array(blocks)).tolist() == [
        0,
        1,
        2,
        3,
    ]
    managed.donors.index_prefix(tracked, other.all_token_ids, blocks)
    assert managed.index.missing(tracked.prompt.namespace, np.array(blocks)).size == 0
    calls = inserted(managed, monkeypatch)
    managed.donors.index_prefix(tracked, other.all_token_ids, blocks)
    assert calls == [], "what is known is not told again"


# References of audits.


def test_blocks_of_a_reference_have_no_names_and_are_taken_first(managed: Managed) -> None:
    """It leaves no trace: nobody finds what it has computed, and the free queue is as it was."""
    known = managed.computed(DOCUMENT)
    reference = Request(
        "reference",
        prompt_token_ids=[*DOCUMENT, 1, 2, 3, 4],
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
    )
    managed.side.add(reference)
    manager, queue = managed.manager, managed.pool.free_block_queue
    before = ids(queue.get_all_free_blocks())
    assert manager.allocate_slots(reference, len(DOCUMENT)) is not None, "a part of its prompt"
    reference.num_computed_tokens = len(DOCUMENT)
    assert manager.allocate_slots(reference, 4) is not None
    held = manager.get_block_ids("reference")[0]
    assert len(held) == 5
    assert all(managed.pool.blocks[i].block_hash is None for i in held)
    assert len(managed.index) == len(known)
    manager.free(reference)
    assert ids(queue.get_all_free_blocks()) == before
    assert ids(managed.pool.get_new_blocks(5)) == held


# What is not computed yet.


def test_a_block_is_fresh_until_its_step_is_over(managed: Managed) -> None:
    request = managed.request(DOCUMENT)
    blocks = ids(managed.named(request))
    again = managed.request([*DOCUMENT, 7])
    hit = len(DOCUMENT)
    assert managed.pool.resident_blocks(again, 0, 4).tolist() == [-1] * 4
    assert managed.pool.prefix_state(again, hit, hit + 2, 0).fresh
    assert not managed.pool.prefix_state(again, 0, hit + 2, 0).fresh
    managed.side.take_step(True)
    assert managed.pool.resident_blocks(again, 1, 4).tolist() == blocks[1:]
    assert not managed.pool.prefix_state(again, hit, hit + 2, 0).fresh


def test_a_block_of_a_request_without_keys_is_fresh_too(managed: Managed) -> None:
    """Who has keys may find its exact blocks."""
    request = managed.request(DOCUMENT, options=None)
    managed.named(request)
    again = managed.request([*DOCUMENT, 7])
    hit = len(DOCUMENT)
    assert managed.pool.prefix_state(again, hit, hit + 2, 0).fresh
    managed.side.take_step(True)
    assert not managed.pool.prefix_state(again, hit, hit + 2, 0).fresh


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_freed_before_it_was_computed_loses_its_name_unless_others_hold_it(
    shared: bool, managed: Managed
) -> None:
    request = managed.request(DOCUMENT)
    blocks = managed.named(request)
    if shared:
        managed.pool.touch(blocks[:2])
    managed.pool.free_blocks(iter(reversed(blocks)))
    assert exact(managed, request) == ([0, 1] if shared else [])
    assert len(managed.index) == (2 if shared else 0)
    assert managed.pool.num_free_blocks() == 31 - (2 if shared else 0)


# Numbers.


def test_what_a_request_takes_of_the_free_blocks(managed: Managed) -> None:
    """Those behind its hit, for all of its slots, and those of the hit that nobody holds."""
    blocks, hit = managed.computed(DOCUMENT), len(DOCUMENT)
    request = managed.request([*DOCUMENT, *range(3)])
    state = managed.pool.prefix_state
    assert state(request, 0, hit + 4, 0).blocks_needed == 5
    assert state(request, hit, hit + 4, 0).blocks_needed == 1 + 4
    assert state(request, hit, hit + 4, 3).blocks_needed == 1 + 4 + 3
    assert state(request, hit, hit + 5, 0).blocks_needed == 2 + 4
    managed.pool.touch(blocks[:3])
    assert state(request, hit, hit + 4, 0).blocks_needed == 1 + 1
    left = ids(managed.computed([*range(50, 50 + 2 * SIZE)]))
    found = state(request, hit + 2 * SIZE, hit + 3 * SIZE, 0, left)
    assert found.blocks_needed == 1 + 1 + 2
    assert found.idle == {*ids(blocks[3:]), *left}, "what an earlier turn has left counts, too"


def test_pinned_blocks_are_held_once_more(managed: Managed) -> None:
    blocks = ids(managed.computed(DOCUMENT))
    free = managed.pool.num_free_blocks()
    managed.pool.pin(blocks)
    managed.pool.pin(blocks[:1])
    assert [managed.pool.references(block) for block in blocks] == [2, 1, 1, 1]
    assert managed.pool.num_free_blocks() == free - 4
    managed.pool.unpin(blocks)
    assert [managed.pool.references(block) for block in blocks] == [1, 0, 0, 0]
    assert managed.pool.num_free_blocks() == free - 1


def test_blocks_that_nobody_holds_are_idle(managed: Managed) -> None:
    blocks = managed.computed(DOCUMENT)
    managed.pool.touch(blocks[:1])
    assert managed.pool.idle(ids(blocks)) == {*ids(blocks[1:])}
    request = managed.request([*DOCUMENT, *range(3)])
    found = managed.pool.prefix_state(request, len(DOCUMENT), len(DOCUMENT) + 4, 0)
    assert found.idle == {*ids(blocks[1:])}


def test_room_beside_donors_is_made_of_frozen_ones(managed: Managed) -> None:
    donors = managed.computed(DOCUMENT)
    managed.freeze("old", 3)
    managed.freeze("new", 3)
    managed.pool.touch(donors)
    managed.hold_all_but(2)
    managed.pool.free_blocks(donors)
    request = managed.request([*range(SIZE), *DOCUMENT, 1])

    def decided(blocks_needed: int) -> int | None:
        state = PrefixState(False, blocks_needed)
        tracked = managed.tracked(request)
        return managed.planner.decide(tracked, 0, request.num_tokens, lambda: state)

    assert decided(2) == request.num_tokens - 1
    assert managed.warm == {"old", "new"}
    assert decided(3) == request.num_tokens - 1
    assert managed.warm == {"new"}
    assert decided(9) == 0, "all that is frozen would not do"
    assert managed.tracked(request).decision.reason == "no_free_blocks"
    assert managed.warm == {"new"}


@pytest.mark.parametrize(("missing", "made"), [(0, False), (1, True), (6, True), (7, False)])
def test_nothing_is_evicted_for_nothing(missing: int, made: bool, managed: Managed) -> None:
    managed.freeze("old", 3)
    managed.freeze("new", 3)
    managed.hold_all_but(2)
    assert managed.pool.make_room(missing) is made
    assert (managed.warm != {"old", "new"}) is made


def test_frozen_blocks_that_a_request_holds_make_no_room(managed: Managed) -> None:
    managed.freeze("read", 3)
    managed.pool.touch([managed.pool.blocks[i] for i in managed.frozen.block_ids])
    managed.hold_all_but(2)
    assert not managed.pool.make_room(1)
    assert managed.warm == {"read"}


def test_a_closed_step_has_no_free_block_but_they_are_there(managed: Managed) -> None:
    managed.planner.budget.close()
    assert managed.pool.get_num_free_blocks() == 0
    assert managed.pool.num_free_blocks() == 31
    managed.side.take_step(True)
    assert managed.pool.get_num_free_blocks() == 31


def test_under_pressure_frozen_blocks_go_when_a_step_ends() -> None:
    managed = Managed(segreuse={"frozen_pressure": 0.5})
    managed.freeze("document", 3)
    managed.side.take_step(True)
    assert managed.warm == {"document"}
    managed.hold_all_but(8)
    managed.side.take_step(True)
    assert managed.warm == set()


# Frozen parts.


def part(managed: Managed, request: Any, first_token: int, blocks: list[int]) -> Any:
    order = FreezeOrder("document", 0, 1, first_token)
    return managed.freezing.part(managed.tracked(request).prompt, order, blocks)


def finished(managed: Managed, tokens: list[int] | None = None) -> tuple[Any, list[int]]:
    request = managed.request(tokens or DOCUMENT)
    blocks = ids(managed.named(request))
    managed.side.take_step(True)
    return request, blocks


@pytest.mark.parametrize(("first_token", "first", "middle"), [(0, 0, 1), (SIZE, 1, 2), (5, 1, 2)])
def test_a_part_is_every_full_block_with_one_of_its_tokens(
    first_token: int, first: int, middle: int, managed: Managed
) -> None:
    request, blocks = finished(managed, [*DOCUMENT, 1])
    found = part(managed, request, first_token, [*blocks, 31])
    assert found.block_ids == blocks[first:]
    assert found.namespace == managed.tracked(request).prompt.namespace
    window = np.array(DOCUMENT[middle * SIZE : (middle + 1) * SIZE], np.int32)
    assert found.probe == int(window_hashes(window, SIZE)[0])


def test_a_part_without_a_block_of_its_own_has_no_probe(managed: Managed) -> None:
    """The block holds tokens of the context, too: no prompt that brings the text has it."""
    request, blocks = finished(managed)
    assert part(managed, request, 4 * SIZE - 1, blocks).probe is None


def test_what_cannot_be_frozen(managed: Managed) -> None:
    request, blocks = finished(managed)
    with pytest.raises(ValueError, match="no full block holds a token from 16 on"):
        part(managed, request, 4 * SIZE, blocks)
    managed.index.remove([blocks[2]])
    with pytest.raises(ValueError, match="1 of its 4 blocks may not donate"):
        part(managed, request, 0, blocks)
    managed.pool.evict_blocks({blocks[2]})
    with pytest.raises(ValueError, match=f"block {blocks[2]} is not exact"):
        part(managed, request, 0, blocks)
    approximate = managed.request([*range(500, 516)])
    managed.tracked(approximate).plan = plan_of(approximate, SIZE)
    named = ids(managed.named(approximate))
    with pytest.raises(ValueError, match=f"block {named[1]} is not exact"):
        part(managed, approximate, 0, named)


# Errors, and a reset.


@pytest.mark.parametrize(
    ("owner", "name", "act"),
    [
        ("index", "remove", lambda managed, block: managed.pool.evict_blocks({block})),
        ("index", "begin_step", lambda managed, block: managed.side.take_step(True).plans),
        ("index", "clear", lambda managed, block: managed.pool.reset_prefix_cache()),
        ("frozen", "lost", lambda managed, block: managed.pool.evict_blocks({block})),
        ("frozen", "relieve", lambda managed, block: managed.side.take_step(True).plans),
        ("frozen", "reset", lambda managed, block: managed.pool.reset_prefix_cache()),
        ("frozen", "make_free", lambda managed, block: managed.pool.make_room(3)),
    ],
)
def test_an_error_over_what_all_share_ends_reuse_and_not_vllm(
    owner: str,
    name: str,
    act: Callable[..., Any],
    managed: Managed,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    [block, *_] = ids(managed.computed(DOCUMENT))
    managed.freeze("document", 3)

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError

    monkeypatch.setattr(getattr(managed, owner), name, fail)
    act(managed, block)
    assert managed.health.broken
    assert caplog.text.count("is off until the prefix cache is reset") == 1
    if act.__code__.co_names[-1] == "evict_blocks":
        assert managed.pool.blocks[block].block_hash is None, "vLLM's own names are gone"


def test_a_broken_index_is_not_asked(managed: Managed, monkeypatch: Patch) -> None:
    blocks = managed.computed(DOCUMENT)
    managed.health.broken = True
    monkeypatch.setattr(managed.index, "remove", lambda block: pytest.fail("it was asked"))
    managed.pool.evict_blocks(set(ids(blocks)))


def test_a_reset_makes_everything_anew(managed: Managed) -> None:
    request = managed.request(DOCUMENT)
    blocks = managed.named(request)
    managed.health.broken = True
    managed.freeze("document", 3)
    assert not managed.pool.reset_prefix_cache(), "a request holds blocks"
    assert managed.warm == {"document"}
    assert managed.health.broken
    managed.pool.free_blocks(blocks)
    assert managed.pool.reset_prefix_cache()
    assert managed.warm == set()
    assert not managed.health.broken
    assert not managed.pool.fresh
    assert len(managed.index) == 0
    assert managed.pool.num_free_blocks() == 31


def test_a_pool_is_adopted_once(managed: Managed) -> None:
    with pytest.raises(RuntimeError, match="found SegmentBlockPool; another plugin has replaced"):
        SegmentBlockPool.adopt(managed.pool, managed.pool.group)


def test_approximate_names_are_no_hashes_of_tokens(managed: Managed) -> None:
    """vLLM's are of fixed length; ours say what they are."""
    request = managed.request(DOCUMENT)
    managed.tracked(request).plan = plan_of(request, 0)
    names = [get_block_hash(block.block_hash) for block in managed.named(request)]
    assert all(name.startswith(b"segreuse:approximate:") for name in names)
    assert {len(name) for name in names}.isdisjoint(map(len, request.block_hashes))


def test_an_allocation_reports_all_that_it_evicts_at_once(managed: Managed) -> None:
    told: list[list[int]] = []

    class Listener(BlockListener):
        def evicted(self, block_ids: Sequence[int]) -> None:
            told.append(list(block_ids))

    managed.pool.listen(Listener())
    first, second = managed.computed(DOCUMENT), managed.computed([7, *DOCUMENT])
    managed.hold_all_but(len(second))
    assert [sorted(each) for each in told] == [sorted(ids(first))]
    [kept, *_] = second
    managed.pool.evict_blocks({kept.block_id})
    assert told[1:] == [[kept.block_id]], "outside of an allocation"


@pytest.mark.parametrize("keeps", [False, True])
def test_without_a_second_tier_allocations_do_not_look_at_what_they_evict(
    keeps: bool, managed: Managed
) -> None:
    told: list[int] = []

    class Listener(BlockListener):
        def evicting(self, block_ids: Sequence[int]) -> None:
            told.extend(block_ids)

    managed.pool.listen(Listener())
    if keeps:
        managed.pool.attach(
            ExactNames(parts_of(managed.side).core.requests, managed.planner, SIZE),
            managed.planner.budget,
            managed.pool.make_room,
            [Listener()],
            keeps_evicted=True,
        )
    blocks = managed.computed(DOCUMENT)
    managed.hold_all_but(0)
    assert all(block.block_hash is None for block in blocks), "they were evicted"
    assert sorted(told) == (sorted(ids(blocks)) if keeps else [])
