# SPDX-License-Identifier: Apache-2.0
"""Each stretch of a prompt has its source, or the nearest reason why it was not found."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from segreuse_extras.explain.forgotten import Forgotten, Why, flags_of
from segreuse_extras.explain.reasons import (
    Reasons,
    Stretch,
    Unused,
    explain,
    unexplored,
    with_acceptance,
    with_left_behind,
    with_recomputed,
)
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import find_matches
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import Halo, Pieces, Tier
from vllm_segreuse.plan.similar import check_of

SIZE = 4
DOCUMENT = [*range(100, 112)]
OTHER = [*range(200, 212)]


class World:
    """An index, and what was in it before."""

    def __init__(self, capacity: int = 32) -> None:
        self.index = SegmentIndex(64, SIZE)
        self.names = NamespaceTable(lambda namespace: self.index.population(namespace) > 0)
        self.mine, self.theirs = self.names.intern(b"mine"), self.names.intern(b"theirs")
        self.forgotten = Forgotten(self.index, self.names, capacity)

    def cache(self, tokens: list[int], first_block: int, namespace: int) -> list[int]:
        blocks = [*range(first_block, first_block + len(tokens) // SIZE)]
        self.index.insert(
            namespace, np.array(blocks, np.int32), np.array(tokens, np.int32), first_position=40
        )
        return blocks

    def evict(self, blocks: Sequence[int]) -> None:
        self.forgotten.removed(blocks)
        self.index.remove(blocks)

    def explain(
        self, tokens: list[int], namespace: int, start: int = 0, other_adapters: Sequence[int] = ()
    ) -> list[Stretch]:
        prompt = Prompt(namespace, np.array(tokens, np.int32))
        hashes = prompt.hashes(SIZE)
        stop = len(tokens) - 1
        found = find_matches(self.index, namespace, prompt.tokens, hashes, start, stop, 4)
        reasons = Reasons(prompt, self.index, self.forgotten, other_adapters)
        return explain(found.pieces, start, len(tokens), reasons)


@pytest.fixture
def world() -> World:
    return World()


def new(start: int, tokens: int, reason: str) -> Stretch:
    return {"start": start, "tokens": tokens, "source": "new", "reason": reason}


def reasons(stretches: list[Stretch]) -> list[str]:
    return [stretch.get("reason", stretch["source"]) for stretch in stretches]


def test_prefix_segments_and_new_text_in_order(world: World) -> None:
    world.cache(DOCUMENT, 0, world.mine)
    world.cache(OTHER, 8, world.mine)
    world.index.begin_step()
    prompt = [1, 2, 3, 4, *OTHER, 5, 6, *DOCUMENT, *range(300, 309), 9]
    assert world.explain(prompt, world.mine, start=4) == [
        {"start": 0, "tokens": 4, "source": "prefix"},
        {"start": 4, "tokens": 12, "source": "segment", "position": 40},
        new(16, 2, "shorter_than_block"),
        {"start": 18, "tokens": 12, "source": "segment", "position": 40},
        new(30, 9, "unknown"),
        new(39, 1, "last_token"),
    ]


def test_a_gap_may_be_one_token(world: World) -> None:
    world.cache(DOCUMENT, 0, world.mine)
    world.index.begin_step()
    sources = reasons(world.explain([*DOCUMENT, 5, *DOCUMENT, 9], world.mine))
    assert sources == ["segment", "shorter_than_block", "segment", "last_token"]


def test_a_segment_that_begins_inside_a_block_has_its_own_position(world: World) -> None:
    world.cache(DOCUMENT, 0, world.mine)
    world.index.begin_step()
    stretches = world.explain([*DOCUMENT[2:], 9], world.mine)
    assert stretches[0] == {"start": 0, "tokens": 10, "source": "segment", "position": 42}


def test_a_segment_of_two_tiers_is_shown_in_parts() -> None:
    table = [[2, 4, 7, 0, 40], [6, 4, 1, 0, 44], [10, 4, 2, 0, 48]]
    pieces = Pieces.from_table(table)
    pieces.source[1:] = Tier.HOST
    found = explain(pieces, 0, 15, lambda start, stop: "unknown")
    assert [each for each in found if each["source"] == "segment"] == [
        {"start": 2, "tokens": 4, "source": "segment", "position": 40},
        {"start": 6, "tokens": 8, "source": "segment", "position": 44, "tier": "host"},
    ]


def test_parts_of_a_similar_segment_have_its_boundary_drift() -> None:
    table = [[2, 4, 7, 0, 40], [6, 4, 1, 0, 44], [10, 4, 2, 0, 80], [14, 4, 3, 0, 84]]
    pieces = Pieces.from_table(table, is_similar=True)
    pieces.source[[1, 3]] = Tier.HOST
    assert len(pieces.similar_segments(0)[0]) == 2
    found = explain(pieces, 0, 19, lambda start, stop: "unknown")
    assert drifts_of(pieces, found, [0.25, 0.5]) == [0.25, 0.25, 0.5, 0.5]


def test_similar_segments_of_two_sequences_have_their_own_boundary_drift() -> None:
    """Texts made of one template have the same positions: only who copied them tells them apart."""
    table = [[6, 4, 7, 0, 40], [10, 4, 1, 0, 44], [18, 4, 3, 0, 80]]
    pieces = Pieces.from_table(table, is_similar=True, begins=[True, True, True])
    found = explain(pieces, 2, 23, lambda start, stop: "unknown")
    assert drifts_of(pieces, found, [0.25, math.nan, 0.5]) == [0.25, None, 0.5]


def drifts_of(pieces: Pieces, found: list[Stretch], drifts: list[float]) -> list[float | None]:
    """What each similar stretch is said to be off; it is rejected above 0.25."""
    start = int(pieces.destination[0])
    check = check_of(Halo(1, 0.25), pieces, start)
    assert check is not None
    tested = with_acceptance(found, start, check, drifts)
    similar = [each for each in tested if each["source"] == "similar"]
    assert [each["rejected"] for each in similar] == [
        each["boundary_drift"] != 0.25 for each in similar
    ]
    return [each["boundary_drift"] for each in similar]


def test_evicted_text_is_told_from_text_that_never_was(world: World) -> None:
    blocks = world.cache(DOCUMENT, 0, world.mine)
    world.index.begin_step()
    world.evict(blocks)
    assert reasons(world.explain([7, *DOCUMENT, 9], world.mine)) == ["evicted", "last_token"]
    assert reasons(world.explain([7, *OTHER, 9], world.mine)) == ["unknown", "last_token"]


def test_the_nearest_reason_counts(world: World) -> None:
    world.evict(world.cache(DOCUMENT, 0, world.mine))
    world.forgotten.too_deep(world.mine, np.array([OTHER[:SIZE]], np.int32))
    assert reasons(world.explain([*OTHER, 9], world.mine))[0] == "too_deep"
    assert reasons(world.explain([*OTHER, *DOCUMENT, 9], world.mine))[0] == "evicted"
    world.cache(DOCUMENT, 0, world.mine)
    assert reasons(world.explain([*OTHER, *DOCUMENT, 9], world.mine))[0] == "computed_now"


def test_cached_text_that_is_in_no_plan_is_not_said_to_be_computed_now(world: World) -> None:
    prompt = Prompt(world.mine, np.array([*DOCUMENT, 9], np.int32))

    def reason() -> str:
        return Reasons(prompt, world.index, world.forgotten)(0, len(DOCUMENT))

    world.cache(DOCUMENT, 0, world.mine)
    assert reason() == "computed_now"
    world.index.begin_step()
    assert reason() == "not_worth_it"
    world.cache(DOCUMENT, 8, world.mine)
    assert reason() == "not_worth_it", "the older copy may donate"


def test_text_of_another_adapter_is_named_where_nothing_nearer_is_known(world: World) -> None:
    adapter = world.names.intern(b"mine, with an adapter")
    world.cache(OTHER, 8, adapter)
    world.index.begin_step()
    prompt = [*OTHER, 9]
    assert reasons(world.explain(prompt, world.mine))[0] == "unknown"
    found = world.explain(prompt, world.mine, other_adapters=[world.theirs, adapter])
    assert reasons(found)[0] == "other_adapter"
    world.evict(world.cache(OTHER, 0, world.mine))
    found = world.explain(prompt, world.mine, other_adapters=[adapter])
    assert reasons(found)[0] == "evicted"


def test_recomputed_tokens_are_runs_within_their_segment() -> None:
    stretches: list[Stretch] = [
        {"start": 0, "tokens": 4, "source": "prefix"},
        {"start": 4, "tokens": 6, "source": "segment", "position": 40},
        {"start": 10, "tokens": 5, "source": "segment", "position": 0},
        {"start": 15, "tokens": 3, "source": "similar", "position": 7},
        new(18, 1, "last_token"),
    ]
    positions = np.array([3, 4, 6, 7, 8, 9, 10, 12, 18], np.int32)
    found = with_recomputed(stretches, positions)
    assert [each.get("recomputed") for each in found] == [
        None,
        [[4, 1], [6, 4]],
        [[10, 1], [12, 1]],
        [],
        None,
    ]
    assert [*map(len, found)] == [3, 5, 5, 5, 4]
    similar = [s | {"source": "similar"} if s["source"] == "segment" else s for s in stretches]
    again = with_recomputed(similar, positions)
    assert [s.get("recomputed") for s in again] == [s.get("recomputed") for s in found]
    unknown = with_recomputed(found, None)
    assert [each["recomputed"] for each in unknown[1:4]] == [None] * 3
    assert found[1]["recomputed"], "the given ones stay as they are"


def test_all_namespaces_of_an_evicted_block_remember_it(world: World) -> None:
    blocks = world.cache(DOCUMENT, 0, world.mine)
    world.index.insert(
        world.theirs, np.array(blocks, np.int32), np.array(DOCUMENT, np.int32), first_position=40
    )
    world.index.begin_step()
    world.evict(blocks)
    for namespace in (world.mine, world.theirs):
        assert reasons(world.explain([*DOCUMENT, 9], namespace))[0] == "evicted"


@pytest.mark.parametrize("state", ["evicted", "too deep", "cached", "computed now"])
def test_nothing_is_said_about_others(state: str) -> None:
    """Their namespace and one that does not exist answer alike, whatever they hold."""
    world = World()
    if state == "too deep":
        world.forgotten.too_deep(world.theirs, np.array(DOCUMENT, np.int32).reshape(-1, SIZE))
    else:
        blocks = world.cache(DOCUMENT, 0, world.theirs)
        if state != "computed now":
            world.index.begin_step()
        if state == "evicted":
            world.evict(blocks)
    nobody = world.names.intern(b"nobody")
    prompt: Any = [*DOCUMENT, *OTHER, 9]
    assert world.explain(prompt, world.mine) == world.explain(prompt, nobody)
    assert reasons(world.explain(prompt, nobody)) == ["unknown", "last_token"]


def test_an_id_that_another_namespace_gets_tells_nothing_of_the_former() -> None:
    world = World()
    blocks = world.cache(DOCUMENT, 0, world.mine)
    world.index.begin_step()
    world.evict(blocks)
    world.names.release(world.mine)
    again = world.names.intern(b"another")
    assert again == world.mine, "this test needs the same id"
    assert reasons(world.explain([*DOCUMENT, 9], again))[0] == "unknown"
    world.names.release(again)
    assert world.names.intern(b"mine") == again
    assert reasons(world.explain([*DOCUMENT, 9], again))[0] == "evicted"


def test_the_oldest_is_forgotten_first() -> None:
    world = World(capacity=4)
    world.evict(world.cache(DOCUMENT, 0, world.mine))
    world.evict(world.cache(OTHER, 8, world.mine))
    known = [
        world.forgotten.windows(Prompt(world.mine, np.array(tokens, np.int32)))[Why.EVICTED].sum()
        for tokens in (DOCUMENT, OTHER)
    ]
    assert known == [1, 3]


def test_a_prompt_in_which_nothing_was_searched_for() -> None:
    prefix = {"start": 0, "tokens": 8, "source": "prefix"}
    assert unexplored(8, 20, "disabled") == [prefix, new(8, 12, "disabled")]
    assert unexplored(0, 20, "disabled") == [new(0, 20, "disabled")]


LAST = new(11, 1, "last_token")


@pytest.mark.parametrize(
    ("start", "new_image", "behind"),
    [
        (0, None, [new(0, 11, "unknown")]),
        (0, 7, [new(0, 7, "unknown"), new(7, 4, "new_image")]),
        (0, 10, [new(0, 10, "unknown"), new(10, 1, "new_image")]),
        (0, 11, [new(0, 11, "unknown")]),
        (0, 0, [new(0, 11, "new_image")]),
        (4, 2, [new(4, 7, "new_image")]),
        (4, 4, [new(4, 7, "new_image")]),
        (11, None, []),
    ],
)
def test_text_from_an_image_on_that_is_new(
    start: int, new_image: int | None, behind: list[Stretch]
) -> None:
    nothing = Pieces.from_table([], begins=True)
    found = explain(nothing, start, 12, lambda start, stop: "unknown", new_image)
    prefix = [{"start": 0, "tokens": start, "source": "prefix"}] if start else []
    assert found == [*prefix, *behind, LAST]


@pytest.mark.parametrize("exact", [0, 3])
def test_what_an_earlier_turn_has_left_is_no_part_of_the_prefix(exact: int) -> None:
    stretches = [{"start": 0, "tokens": 8, "source": "prefix"}, new(8, 3, "unknown"), LAST]
    taken = {"start": exact, "tokens": 8 - exact, "source": "segment", "position": exact}
    prefix = [{"start": 0, "tokens": exact, "source": "prefix"}] if exact else []
    assert with_left_behind(stretches, exact) == [
        *prefix,
        taken | {"in_context": True, "recomputed": []},
        *stretches[1:],
    ]


@pytest.mark.parametrize(
    ("start", "stop", "reason"),
    [(0, 8, "other"), (0, 9, "why"), (8, 9, "why"), (11, 20, "why"), (12, 20, "other")],
)
def test_only_text_that_was_found_is_unused(start: int, stop: int, reason: str) -> None:
    pieces = Pieces.from_table([(8, 4, 3, 0, 0)], begins=True)
    assert Unused(pieces, "why", lambda start, stop: "other")(start, stop) == reason


@pytest.mark.parametrize(
    ("tokens", "reason"), [(SIZE - 1, "shorter_than_block"), (SIZE, "unknown")]
)
def test_text_of_a_block_may_be_found(tokens: int, reason: str, world: World) -> None:
    found = world.explain([*range(300, 300 + tokens), 7], world.mine)
    assert found[0] == new(0, tokens, reason)


@pytest.mark.parametrize("wanted", [0, 1, 300])
@pytest.mark.parametrize("shift", [0, 32, 58])
def test_flags_are_those_of_all_equal_marks(wanted: int, shift: int) -> None:
    """Marks that collide in the table among them, zero, and some that are there twice."""
    rng = np.random.default_rng(7)
    some = rng.integers(0, 60, wanted).astype(np.uint64) << np.uint64(shift)
    marks = rng.integers(0, 60, 50).astype(np.uint64) << np.uint64(shift)
    flags = rng.integers(0, 4, 50).astype(np.uint8)
    expected = [int(np.bitwise_or.reduce(flags[marks == it], initial=0)) for it in some]
    assert flags_of(some, marks, flags).tolist() == expected
