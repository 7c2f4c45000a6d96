# SPDX-License-Identifier: Apache-2.0
"""Plans are made, pinned and unpinned exactly once; work per step is bounded; reports add up."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields as fields_of
from itertools import count

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from segreuse_extras.explain.forgotten import Forgotten
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Prompt, none_resident
from vllm_segreuse.compat.block_events import PrefixState
from vllm_segreuse.plan import (
    BoolArray,
    Boundary,
    Fixed,
    Gather,
    IntArray,
    Probed,
    Recipe,
    ReusePlan,
    fates_of,
)
from vllm_segreuse.scheduling.budget import StepBudget
from vllm_segreuse.scheduling.donors import Donors
from vllm_segreuse.scheduling.exact_names import ExactNames
from vllm_segreuse.scheduling.health import Health
from vllm_segreuse.scheduling.planner import Planner
from vllm_segreuse.scheduling.tracked import Bypass, Method, Report, TrackedRequest, Use

SIZE = 4  # tokens per block
BUDGET = 60  # tokens per step
MAX_DEPTH = 2


class Pins:
    """A block pool that counts, and refuses to let go what is not held."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.pinned = self.unpinned = 0
        self.room = 10**6
        self.of_others: set[int] = set()  # blocks that others hold

    def pin(self, block_ids: list[int]) -> None:
        assert len(set(block_ids)) == len(block_ids), "a block pinned twice by one plan"
        self.held.update(block_ids)
        self.pinned += 1

    def unpin(self, block_ids: list[int]) -> None:
        self.held.subtract(block_ids)
        assert min(self.held.values(), default=0) >= 0, "a block let go that was not held"
        self.unpinned += 1

    def idle(self, block_ids: Iterable[int]) -> set[int]:
        return set(block_ids).difference(self.of_others)

    def num_free_blocks(self) -> int:
        return self.room

    @property
    def blocks(self) -> list[int]:
        """Held blocks, each as often as it is held."""
        return sorted(self.held.elements())


def new_only(reused: BoolArray, _: IntArray) -> Recipe:
    return Recipe.without_choice(~reused)


def everything(reused: BoolArray, _: IntArray) -> Recipe:
    return Recipe.of(Fixed(), fates_of(np.ones_like(reused), ~reused))


def half_by_score(reused: BoolArray, _: IntArray) -> Recipe:
    return Recipe.of(Boundary(), fates_of(~reused, ~reused), int(reused.sum()) // 2)


def at_most_all(reused: BoolArray, _: IntArray) -> Recipe:
    """Workers may choose every reused token, or none."""
    return Recipe.of(Probed(Gather.MAX, 0.1), fates_of(~reused, ~reused), int(reused.sum()))


def dense(reused: BoolArray, _: IntArray) -> Recipe:
    return Recipe.of(Boundary(1), fates_of(~reused, ~reused), 1)


class World:
    """A planner over an index, and documents to make prompts of."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.index = SegmentIndex(num_blocks, SIZE)
        self.pins = Pins()
        self.spread = False  # whether the plans to come are
        self.match_times: list[float] = []
        self.prefix_lookups = 0
        self.to_spare: list[int] = []  # blocks that can be made free, at once each
        self.health = Health()
        self.budget = StepBudget(BUDGET)
        self.finder = ContentFinder(self.index, MAX_DEPTH)
        requests: dict[str, TrackedRequest] = {}
        namespaces = NamespaceTable()
        for number in range(4):
            namespaces.intern(bytes([number]))
        forgotten = Forgotten(self.index, namespaces, 64)
        self.donors = Donors(self.index, requests, MAX_DEPTH, self.health, [forgotten])
        ticks = count()
        self.planner = Planner(
            requests,
            self.pins,
            self.make_room,
            self.budget,
            self.health,
            SIZE,
            lambda plan: self.spread,
            lambda: next(ticks),
            self.match_times.append,
        )
        self._block_ids, self._tokens, self._ids = count(), count(1), count()

    def make_room(self, missing: int) -> bool:
        assert missing > 0
        if not self.to_spare:
            return False
        self.pins.room += self.to_spare.pop(0)
        return True

    def end_step(self) -> list[ReusePlan]:
        """What the scheduler's side does behind each step."""
        plans = self.planner.take_plans()
        self.donors.begin_step()
        return plans

    def new_tokens(self, number: int) -> list[int]:
        """Tokens that were never used before."""
        return [next(self._tokens) for _ in range(number)]

    def document(self, num_blocks: int, depth: int = 0) -> tuple[list[int], list[int]]:
        """(tokens, blocks) of a cached document; a donor from the next step on."""
        tokens = self.new_tokens(num_blocks * SIZE)
        blocks = [next(self._block_ids) for _ in range(num_blocks)]
        ids, content = np.array(blocks, np.int32), np.array(tokens, np.int32)
        self.index.insert(0, ids, content, 0, depths=depth)
        return tokens, blocks

    def request(self, tokens: Sequence[int], **fields) -> TrackedRequest:
        """A request that has arrived."""
        namespace = fields.pop("namespace", 0)
        resident = fields.pop("resident_blocks", none_resident)
        prompt = Prompt(namespace, np.array(tokens, np.int32), resident)
        how = {"policy": "test", "min_reused_tokens": SIZE, "make_recipe": new_only}
        how |= {"finder": self.finder}
        how |= {it.name: fields.pop(it.name) for it in fields_of(Method) if it.name in fields}
        bypass = fields.pop("bypass", None)
        if bypass is not None:
            fields["mode"] = Bypass(bypass, restores=True)
        name = f"request {next(self._ids)}"
        tracked = TrackedRequest(name, prompt, Method(**how), **fields)
        self.planner.add(tracked)
        return tracked

    def decide(
        self, tracked: TrackedRequest, start: int = 0, fresh: bool = False, needed: int = 0
    ) -> int | None:
        def prefix() -> PrefixState:
            self.prefix_lookups += 1
            return PrefixState(fresh, needed)

        return self.planner.decide(tracked, start, tracked.num_tokens, prefix)

    def admit(self, tracked: TrackedRequest, start: int = 0) -> Report:
        self.decide(tracked, start)
        return self.planner.allocated(tracked, blocks_of(tracked))


def blocks_of(tracked: TrackedRequest) -> list[int]:
    """A block table of the right length, of blocks no document has."""
    return [1000 + i for i in range(-(-tracked.num_tokens // SIZE))]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def document(world: World) -> tuple[list[int], list[int]]:
    tokens, blocks = world.document(3)
    world.end_step()
    return tokens, blocks


# One plan, one pin.


def test_an_admitted_plan_is_pinned_until_the_step_ends(world, document):
    tokens, blocks = document
    tracked = world.request(world.new_tokens(3) + tokens + world.new_tokens(2))
    assert world.decide(tracked) == 3 + 12, "what is behind it is left to vLLM"
    assert world.pins.blocks == blocks
    report = world.planner.allocated(tracked, [7, 8, 9, 10, 11])
    assert report == Report(0, 12, 0, 5, 1, None)
    assert world.pins.blocks == blocks
    (plan,) = world.end_step()
    assert world.pins.blocks == []
    assert (world.pins.pinned, world.pins.unpinned) == (1, 1)
    assert (plan.start, plan.stop, plan.donor_blocks) == (0, 15, blocks[::-1])
    assert plan.block_ids.tolist() == [7, 8, 9, 10, 11]
    assert plan.token_ids.tolist() == tracked.prompt.tokens[:15].tolist()
    assert plan.token_at_stop == tracked.prompt.tokens[15]
    assert world.end_step() == []


def test_a_plan_without_blocks_is_dropped_with_its_pins_and_made_anew(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    assert world.decide(tracked) == 12
    assert world.end_step() == []
    assert world.pins.blocks == []
    assert tracked.plan is None
    assert world.decide(tracked) == 12
    world.planner.allocated(tracked, blocks_of(tracked))
    assert len(world.end_step()) == 1
    assert (world.pins.pinned, world.pins.unpinned) == (2, 2)


def test_deciding_again_replaces_the_plan(world, document):
    tokens, blocks = document
    tracked = world.request(tokens + world.new_tokens(3))
    world.decide(tracked, start=0)
    world.decide(tracked, start=SIZE)
    assert world.pins.blocks == blocks[1:]
    report = world.planner.allocated(tracked, blocks_of(tracked))
    assert (report.prefix_tokens, report.reused_tokens, report.new_tokens) == (4, 8, 3)
    (plan,) = world.end_step()
    assert (plan.start, plan.num_tokens) == (4, 8)
    assert world.pins.blocks == []


def test_a_request_that_ends_while_its_plan_is_pending_lets_go(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    world.decide(tracked)
    assert world.planner.remove(tracked.request_id) is tracked
    assert world.pins.blocks == []
    assert world.planner.get(tracked.request_id) is None
    assert world.planner.remove(tracked.request_id) is None
    assert world.end_step() == []
    assert world.pins.unpinned == 1


def test_with_other_weights_nothing_is_reused_until_all_is_forgotten(world, document):
    world.health.weights_changed()
    tracked = world.request(world.new_tokens(1) + document[0])
    assert world.decide(tracked) == 0
    report = world.planner.allocated(tracked, blocks_of(tracked))
    assert (report.bypass_reason, report.reused_tokens) == ("weights_changed", 0)
    world.health.recover()
    assert world.decide(world.request(world.new_tokens(1) + document[0])) > 0


def test_given_up_before_it_runs_lets_go_and_neither_reuses_nor_donates(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    world.decide(tracked)
    world.planner.give_up(tracked.request_id)
    assert world.pins.blocks == []
    assert world.planner.allocated(tracked, blocks_of(tracked)).bypass_reason == "error"
    assert world.end_step() == []
    assert world.decide(tracked) == 0
    assert not tracked.donates


def test_given_up_after_it_was_admitted_still_carries_its_plan_out(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    world.admit(tracked)
    world.planner.give_up(tracked.request_id)
    assert [plan.request_id for plan in world.end_step()] == [tracked.request_id]
    assert world.pins.blocks == []
    assert tracked.plan is not None  # its blocks stay approximate


def test_an_error_over_a_preempted_request_does_not_bring_its_old_plan_back(world, document):
    """It has other blocks by now, and the plan's donors are no longer held."""
    tracked = world.request(world.new_tokens(1) + document[0])
    world.admit(tracked)
    world.end_step()
    world.planner.give_up(tracked.request_id)  # preempted, and asked about once more
    report = world.planner.allocated(tracked, blocks_of(tracked))
    assert (report.bypass_reason, report.reused_tokens) == ("error", 0)
    assert tracked.plan is None
    assert world.end_step() == []
    assert (world.pins.pinned, world.pins.unpinned) == (1, 1)


def test_requests_without_extra_keys_are_unknown(world):
    assert world.planner.get("other") is None
    assert world.planner.remove("other") is None
    world.planner.give_up("other")


# Why a request runs without reuse.


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"bypass": "multimodal"}, "multimodal"),
        ({"min_reused_tokens": 13}, "too_few_reused_tokens"),
        ({"min_reused_tokens": 15}, "too_few_tokens"),
        ({"namespace": 1}, "too_few_reused_tokens"),
    ],
)
def test_bypass_reasons(world, document, fields, reason):
    tracked = world.request(world.new_tokens(1) + document[0] + world.new_tokens(2), **fields)
    report = world.admit(tracked)
    assert report == Report(0, 0, 0, 15, 0, reason)
    assert world.pins.pinned == 0
    assert world.end_step() == []


def test_fewer_tokens_than_a_block_are_not_even_matched(world, document):
    tracked = world.request(document[0][:SIZE], min_reused_tokens=1)
    assert world.admit(tracked).bypass_reason == "too_few_tokens"
    assert world.match_times == []


def test_as_many_tokens_as_are_asked_for_are_enough(world, document):
    prompt = world.new_tokens(1) + document[0] + world.new_tokens(1)
    assert world.decide(world.request(prompt, min_reused_tokens=12)) == 13
    assert world.decide(world.request([*document[0][:SIZE], 9], min_reused_tokens=1)) == SIZE


def test_after_an_error_over_what_all_share_nothing_is_planned(world, document):
    world.health.broken = True
    report = world.admit(world.request(world.new_tokens(1) + document[0]))
    assert (report.bypass_reason, report.reused_tokens) == ("error", 0)


def test_switched_off(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    world.planner.enabled = False
    assert world.admit(tracked).bypass_reason == "disabled"
    world.planner.enabled = True
    assert world.decide(tracked) == 12


def test_what_is_observed_is_of_the_last_decision_and_pins_nothing(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    world.planner.observes = True
    assert world.decide(tracked, needed=5) == 0
    assert tracked.observed.num_reused == 11
    assert world.pins.pinned == world.prefix_lookups == 0
    world.planner.enabled = False
    assert world.admit(tracked).bypass_reason == "disabled"
    assert tracked.observed is None


def test_donors_that_leave_no_room_are_not_pinned(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    world.pins.room = 3 + 4
    assert world.decide(tracked, needed=7) == 0
    assert world.planner.allocated(tracked, blocks_of(tracked)).bypass_reason == "no_free_blocks"
    assert world.pins.pinned == 0
    assert world.decide(tracked, needed=4) == 12
    assert tracked.plan.num_reused == 11


def test_as_many_donors_are_given_up_as_have_to_be(world, document):
    tokens, blocks = document
    tracked = world.request(world.new_tokens(1) + tokens + world.new_tokens(1))
    world.pins.room = 3 + 4
    for needed, kept in ((4, 3), (5, 2), (6, 1), (4, 3)):
        assert world.decide(tracked, needed=needed) == 1 + SIZE * kept, "vLLM computes the rest"
        assert world.pins.blocks == blocks[:kept]
        assert tracked.plan.num_reused == SIZE * kept
        assert (tracked.decision.given_up is not None) == (kept < 3)
    report = world.planner.allocated(tracked, blocks_of(tracked))
    assert (report.reused_tokens, report.bypass_reason) == (12, None)


def test_donors_that_others_hold_are_not_given_up(world, document):
    tokens, blocks = document
    tracked = world.request(world.new_tokens(1) + tokens + world.new_tokens(1))
    world.pins.room, world.pins.of_others = 4, {*blocks[1:]}
    assert world.decide(tracked, needed=4) == 13
    assert world.pins.blocks == blocks[1:]
    world.pins.of_others = {*blocks}
    assert world.decide(tracked, needed=4) == 13
    assert world.pins.blocks == blocks
    assert world.decide(tracked, needed=5) == 0, "without its own blocks it does not run"
    assert tracked.decision.reason == "no_free_blocks"


def test_a_plan_that_is_required_is_whole(world, document):
    tracked = world.request(
        world.new_tokens(1) + document[0] + world.new_tokens(1), mode=Use.REQUIRE
    )
    world.pins.room = 3 + 4
    assert (world.decide(tracked, needed=5), tracked.decision.reason) == (0, "no_free_blocks")
    assert world.decide(tracked, needed=4) == 13


def test_a_plan_with_fewer_donors_has_its_place_in_the_budget(world, document):
    other, _ = world.document(12)
    world.end_step()
    first = world.request(world.new_tokens(40) + document[0] + world.new_tokens(1))
    assert world.decide(first) == 52
    prompt = world.new_tokens(1) + other + world.new_tokens(1)
    second = world.request(prompt, make_recipe=half_by_score)
    world.pins.room = 12 + 4
    assert world.decide(second, needed=13) == 0, "it computes 37 at least, and 40 of 60 are taken"
    assert world.planner.admission_closed
    assert world.pins.blocks == document[1]


def test_what_fits_and_saves_nothing_is_not_reused(world, document):
    def little(reused: BoolArray, _: IntArray) -> Recipe | None:
        return Recipe.without_choice(~reused) if reused.sum() > 2 * SIZE else None

    prompt = world.new_tokens(1) + document[0] + world.new_tokens(1)
    tracked = world.request(prompt, make_recipe=little, work=lambda recipe: 1)
    world.pins.room = 3 + 4
    assert world.decide(tracked, needed=5) == 0
    assert tracked.decision.reason == "no_free_blocks", "with more room it would save something"


def test_room_beside_donors_is_made_until_it_is_enough(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    world.pins.room, world.to_spare = 3 + 4, [1, 1, 1]
    assert world.decide(tracked, needed=6) == 12
    assert world.to_spare == [1], "no more than is needed"
    assert tracked.plan.num_reused == 11
    assert world.decide(tracked, needed=8) == 9
    assert world.to_spare == []
    assert tracked.plan.num_reused == 8, "what is missing still is given up"


def test_donors_deeper_than_allowed_do_not_count(world):
    tokens, _ = world.document(3, depth=MAX_DEPTH + 1)
    world.end_step()
    report = world.admit(world.request(world.new_tokens(1) + tokens))
    assert report.bypass_reason == "too_few_reused_tokens"


def test_a_fresh_prefix_is_waited_for(world, document):
    tracked = world.request(world.new_tokens(4) + document[0] + world.new_tokens(1))
    assert world.decide(tracked, start=4, fresh=True) is None
    assert world.pins.pinned == 0
    assert not world.planner.admission_closed
    assert world.decide(tracked, start=4) == 12


def test_fresh_donors_are_none_until_the_step_is_over(world):
    tokens, _ = world.document(3)
    tracked = world.request(world.new_tokens(1) + tokens)
    assert world.decide(tracked) == 0
    assert tracked.decision.reason == "too_few_reused_tokens"
    world.end_step()
    assert world.decide(tracked) == 12


def test_the_prefix_is_looked_up_only_if_there_is_something_to_reuse(world, document):
    world.decide(world.request(world.new_tokens(20)))
    assert world.prefix_lookups == 0
    world.decide(world.request(world.new_tokens(1) + document[0]))
    assert world.prefix_lookups == 1


# Work per step is bounded.


def test_the_budget_of_a_step_closes_admission(world, document):
    def large() -> TrackedRequest:
        return world.request(world.new_tokens(25) + document[0] + world.new_tokens(1))

    first, second, third = (large() for _ in range(3))
    small = world.request(world.new_tokens(1) + document[0])
    assert world.decide(first) == 37  # computes 25 of them
    assert world.decide(second) == 37
    assert not world.planner.admission_closed
    assert world.decide(third) == 0
    assert world.planner.admission_closed
    assert world.decide(small) == 0  # nobody overtakes
    assert world.pins.pinned == 2
    world.end_step()
    assert not world.planner.admission_closed
    assert world.decide(third) == 37


def test_a_step_may_be_filled_to_the_last_token(world, document):
    first, second, third = (
        world.request(world.new_tokens(BUDGET // 2) + document[0] + world.new_tokens(1))
        for _ in range(3)
    )
    assert world.decide(first) == world.decide(second) == BUDGET // 2 + 12
    assert not world.planner.admission_closed
    assert world.decide(third) == 0
    assert third.decision.reason is None, "it is asked again"
    assert world.planner.admission_closed
    assert world.pins.pinned == 2


def test_a_plan_dropped_within_the_step_gives_its_budget_back(world, document):
    first = world.request(world.new_tokens(50) + document[0] + world.new_tokens(1))
    second = world.request(world.new_tokens(50) + document[0] + world.new_tokens(1))
    assert world.decide(first) == 62
    world.planner.remove(first.request_id)
    assert world.decide(second) == 62


def test_a_plan_larger_than_a_step_is_admitted_alone(world, document):
    small = world.request(world.new_tokens(1) + document[0] + world.new_tokens(1))
    oversized = world.request(world.new_tokens(BUDGET + 40) + document[0] + world.new_tokens(1))
    assert world.decide(small) == 13
    assert world.decide(oversized) == 0
    assert world.planner.admission_closed
    world.end_step()
    assert world.decide(oversized) == BUDGET + 52
    assert world.decide(small) == 0
    assert world.planner.admission_closed


def test_lookups_per_step_are_bounded(world, document):
    limit = 16
    misses = [world.request(world.new_tokens(20)) for _ in range(limit)]
    behind = world.request(world.new_tokens(1) + document[0])
    assert [world.decide(tracked) for tracked in misses] == [0] * limit
    assert world.decide(behind) == 0
    assert behind.decision.reason is None
    assert world.planner.admission_closed
    assert len(world.match_times) == limit
    world.end_step()
    assert world.decide(behind) == 12


def test_fresh_prefixes_count_as_lookups(world, document):
    """Their matches are remembered, but looking their prefixes up costs time, too."""
    limit = 16
    prompt = world.new_tokens(4) + document[0] + world.new_tokens(1)
    tracked = world.request(prompt)
    answers = [world.decide(tracked, start=4, fresh=True) for _ in range(2 * limit)]
    assert answers.count(None) == limit - 1
    assert world.planner.admission_closed


def test_nothing_is_looked_up_once_admission_is_closed(world, document, monkeypatch):
    filler = world.request(world.new_tokens(BUDGET) + document[0])
    assert world.decide(filler)
    waiting = [world.request(world.new_tokens(2) + document[0]) for _ in range(500)]
    searching = "cache.finder.find_matches", "cache.prompt.window_hashes"
    for name in (*searching, "plan.Pieces.reused"):
        monkeypatch.setattr(f"vllm_segreuse.{name}", pytest.fail)
    assert {world.decide(tracked) for tracked in waiting} == {0}
    assert (world.prefix_lookups, world.pins.pinned) == (1, 1)


def test_a_match_is_remembered_while_nothing_changes(world, document):
    tracked = world.request(world.new_tokens(1) + document[0])
    for _ in range(5):
        world.decide(tracked)
        world.end_step()
    assert len(world.match_times) == 1
    assert world.match_times == [1]  # one tick of the clock
    world.document(1)
    world.decide(tracked)
    assert len(world.match_times) == 2
    world.end_step()
    world.decide(tracked)  # what was inserted is a donor from now on
    assert len(world.match_times) == 3
    world.decide(tracked, start=SIZE)
    assert len(world.match_times) == 4


def test_a_preempted_request_is_matched_with_its_new_tokens(world, document):
    answer, _ = world.document(2)
    tracked = world.request(world.new_tokens(1) + document[0])
    assert world.admit(tracked).reused_tokens == 11
    world.end_step()
    longer = np.concatenate([tracked.prompt.tokens, np.array([*answer, 17], np.int32)])
    tracked.prompt = tracked.prompt.with_tokens(longer)
    report = world.admit(tracked)
    assert report == Report(0, 20, 0, 2, 2, None)
    (plan,) = world.end_step()
    assert plan.token_ids.tolist() == longer[:-1].tolist()
    assert world.pins.blocks == []


# Reports.


@pytest.mark.parametrize("recipe", [new_only, everything, half_by_score, dense])
@pytest.mark.parametrize("start", [0, 4, 8])
def test_reports_add_up(world, document, recipe, start):
    prompt = world.new_tokens(8) + document[0] + world.new_tokens(5) + document[0][:7] + [9]
    report = world.admit(world.request(prompt, make_recipe=recipe), start)
    assert report.prefix_tokens == start
    assert report.prefix_tokens + report.reused_tokens + report.new_tokens == len(prompt)
    assert report.reused_tokens == 19
    assert report.matches == 2
    expected = {new_only: 0, everything: 19, half_by_score: 9, dense: 1}
    assert report.recomputed_tokens == expected[recipe]


def test_dense_layers_make_every_token_active(world, document):
    """Also the last, which is read to choose."""
    for recipe, active in ((new_only, 2), (dense, 15), (half_by_score, 2 + 6), (everything, 14)):
        prompt = world.new_tokens(2) + document[0] + world.new_tokens(1)
        tracked = world.request(prompt, make_recipe=recipe)
        world.admit(tracked)
        assert tracked.plan is not None
        assert tracked.plan.active_tokens == active
        world.end_step()


# Plans over several steps.


def test_a_spread_plan_takes_nothing_of_the_step(world, document):
    world.spread = True
    for _ in range(3):
        prompt = world.new_tokens(BUDGET + 1) + document[0] + world.new_tokens(2)
        assert world.decide(world.request(prompt)) == len(prompt) - 2
    world.spread = False
    assert world.decide(world.request(document[0] + world.new_tokens(2))) == 12
    assert not world.planner.admission_closed


@pytest.mark.parametrize("spread", [False, True])
def test_a_question_that_is_read_to_choose_is_left_to_vllm(world, document, spread):
    world.spread = spread
    asked = world.new_tokens(5)
    prompt = world.new_tokens(4) + document[0] + asked
    tracked = world.request(prompt, make_recipe=half_by_score)
    assert world.decide(tracked) == len(prompt) - 5
    assert tracked.plan.suffix.tolist() == asked
    assert tracked.plan.written_until == len(prompt)
    names = ExactNames({tracked.request_id: tracked}, world.planner, SIZE)
    assert names.written_until(tracked.request_id) == len(prompt), "its slots are allocated"
    assert names.written_until("another") == 0


def test_a_plan_that_missed_room_while_nobody_else_had_any_gives_up_as_much_once(world, document):
    tracked = world.request(document[0] + world.new_tokens(3))
    world.pins.room = 7
    assert world.decide(tracked, needed=4)
    tracked.allocation_failed = 2
    assert world.end_step() == []
    assert world.decide(tracked, needed=4)
    assert world.pins.blocks == document[1][:1]
    tracked.allocation_failed = 3
    assert (world.decide(tracked, needed=4), tracked.decision.reason) == (0, "no_free_blocks")
    assert world.pins.blocks == []
    assert world.decide(tracked, needed=4), "if it waits on, others have come"
    assert world.pins.blocks == document[1]


def test_what_was_called_back_reuses_nothing(world, document):
    world.spread = True
    tracked = world.request(document[0] + world.new_tokens(3))
    world.admit(tracked)
    world.end_step()
    world.planner.call_back(tracked.request_id)
    world.planner.call_back("nobody")
    assert tracked.plan is None
    assert world.decide(tracked) == 0
    assert world.planner.allocated(tracked, blocks_of(tracked)).bypass_reason == "reset"
    assert world.end_step() == []
    assert not world.pins.blocks


class Protocol(RuleBasedStateMachine):
    """Everything vLLM may do with requests, in any order: no pin without a live plan."""

    @initialize()
    def start(self) -> None:
        self.world = World()
        self.documents = [self.world.document(n)[0] for n in (1, 2, 3, 2)]
        self.world.end_step()
        self.waiting: list[TrackedRequest] = []
        self.running: list[TrackedRequest] = []
        self.pending: dict[str, ReusePlan] = {}  # decided in this step, no blocks yet
        self.admitted: dict[str, ReusePlan] = {}  # with blocks, in this step

    @rule(
        order=st.lists(st.integers(0, 3), max_size=4),
        gap=st.integers(0, 70),
        recipe=st.sampled_from([new_only, everything, half_by_score, at_most_all, dense]),
        bypass=st.sampled_from([None, None, None, "multimodal"]),
    )
    def arrive(self, order, gap, recipe, bypass) -> None:
        tokens = self.world.new_tokens(gap)
        for document in order:
            tokens = tokens + self.documents[document] + self.world.new_tokens(1)
        tracked = self.world.request([*tokens, 5], make_recipe=recipe, bypass=bypass)
        self.waiting.append(tracked)

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(),
        blocks=st.integers(0, 2),
        fresh=st.booleans(),
        room=st.sampled_from([0, 5, 100]),
    )
    def ask(self, data, blocks, fresh, room) -> None:
        tracked = data.draw(st.sampled_from(self.waiting))
        start = min(blocks * SIZE, (tracked.num_tokens - 1) // SIZE * SIZE)
        self.world.pins.room = room
        was_closed = self.world.planner.admission_closed
        self.pending.pop(tracked.request_id, None)
        answer = self.world.decide(tracked, start, fresh, needed=3)
        if answer:
            assert not was_closed
            assert not fresh
            assert tracked.plan is not None
            plan = tracked.plan
            assert start + answer == plan.stop
            if plan.recipe.program.probes_suffix:
                assert plan.stop + len(plan.suffix) == tracked.num_tokens
                assert plan.stop == plan.pieces.stop or plan.recipe.always[-1]
            elif plan.recipe.program == Fixed() and not tracked.is_required:
                assert plan.stop == plan.pieces.stop
            else:
                assert plan.stop == tracked.num_tokens - 1
            assert len(tracked.plan.donor_blocks) <= room - 3
            self.pending[tracked.request_id] = tracked.plan
        else:
            assert tracked.plan is None

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def allocate(self, data) -> None:
        """vLLM gives blocks to whom it has just asked about, plan or not."""
        tracked = data.draw(st.sampled_from(self.waiting))
        if tracked.plan is None and self.world.decide(tracked) != 0:
            self.world.planner.give_up(tracked.request_id)
        report = self.world.planner.allocated(tracked, blocks_of(tracked))
        parts = report.prefix_tokens, report.reused_tokens, report.new_tokens
        assert sum(parts) == tracked.num_tokens
        assert report.recomputed_tokens <= report.reused_tokens
        assert (report.bypass_reason is None) == (tracked.plan is not None)
        plan = self.pending.pop(tracked.request_id, None)
        assert plan is tracked.plan
        if plan is not None:
            self.admitted[tracked.request_id] = plan
        self.waiting.remove(tracked)
        self.running.append(tracked)

    @rule()
    def end_step(self) -> None:
        plans = self.world.end_step()
        assert [id(plan) for plan in plans] == [id(plan) for plan in self.admitted.values()]
        self.pending, self.admitted = {}, {}
        assert not self.world.planner.admission_closed
        assert self.world.pins.blocks == []

    @precondition(lambda self: self.running)
    @rule(data=st.data(), generated=st.integers(0, 5))
    def preempt(self, data, generated) -> None:
        self.end_step()  # what was admitted in this step is not preempted in it
        tracked = data.draw(st.sampled_from(self.running))
        if generated:
            more = np.array(self.world.new_tokens(generated), np.int32)
            longer = np.concatenate([tracked.prompt.tokens, more])
            tracked.prompt = tracked.prompt.with_tokens(longer)
        self.running.remove(tracked)
        self.waiting.append(tracked)
        self.world.decide(tracked)
        if tracked.plan is not None:
            self.pending[tracked.request_id] = tracked.plan

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), error=st.booleans())
    def leave(self, data, error) -> None:
        tracked = data.draw(st.sampled_from(self.waiting))
        self.pending.pop(tracked.request_id, None)
        if error:
            self.world.planner.give_up(tracked.request_id)
        else:
            assert self.world.planner.remove(tracked.request_id) is tracked
            self.waiting.remove(tracked)
        assert tracked.plan is None

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data) -> None:
        self.end_step()
        tracked = data.draw(st.sampled_from(self.running))
        assert self.world.planner.remove(tracked.request_id) is tracked
        self.running.remove(tracked)

    @invariant()
    def pins_are_those_of_live_plans(self) -> None:
        live = [*self.pending.values(), *self.admitted.values()]
        assert self.world.pins.blocks == sorted(b for plan in live for b in plan.donor_blocks)
        active = [plan.active_tokens for plan in live]
        assert sum(active) == self.world.budget.tokens
        assert sum(active) <= BUDGET or len(live) == 1


TestProtocol = Protocol.TestCase
