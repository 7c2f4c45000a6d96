# SPDX-License-Identifier: Apache-2.0
"""Each safeguard of the scheduler's side is broken once, and the models notice.

A fault changes what one function does, in memory; everything else is as it is. It is noticed if a
run of a model fails, with the message that says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from segreuse_extras.context import finder as same_context
from segreuse_extras.conversations.conversations import Conversations
from tests.stateful import test_world
from tests.stateful.simulation import simulate
from tests.stateful.world import DOCUMENTS, SIZE, Ask, Setup, World
from vllm_segreuse.cache import finder
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable, namespace_key
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.compat import scheduler as compat_scheduler
from vllm_segreuse.compat.block_events import PrefixState
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.features.knowledge import scheduler as frozen_documents
from vllm_segreuse.features.knowledge.freezing import Freezing
from vllm_segreuse.features.knowledge.frozen import FrozenPool
from vllm_segreuse.plan import FreezeOrder, ReusePlan
from vllm_segreuse.scheduling import arrival
from vllm_segreuse.scheduling.budget import StepBudget
from vllm_segreuse.scheduling.donors import Donors
from vllm_segreuse.scheduling.planner import Planner
from vllm_segreuse.scheduling.reporting import Accounts
from vllm_segreuse.scheduling.scheduler import SchedulerSide, Step
from vllm_segreuse.scheduling.tracked import TO_THE_END, LeftBehind, TrackedRequest, Use

Patch = pytest.MonkeyPatch

MOST_SEEDS = 30
"""Simulations of a fault, one after the other, until one notices: nearly always the first."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _pretending(patch: Patch, owner: type, method: str, **attributes: Any) -> None:
    """While a method runs, attributes of its object have other values."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def pretending(self: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as meanwhile:
            for name, value in attributes.items():
                meanwhile.setattr(self, name, value)
            return original(self, *args, **kwargs)

    patch.setattr(owner, method, pretending)


# Pins.


def donors_are_not_pinned(patch: Patch) -> None:
    patch.setattr(SegmentBlockPool, "pin", _nothing)
    patch.setattr(SegmentBlockPool, "unpin", _nothing)


def pins_of_plans_without_blocks_stay(patch: Patch) -> None:
    take_plans = Planner.take_plans

    def forgetful(self: Planner) -> list[ReusePlan]:
        self._pending.clear()
        return take_plans(self)

    patch.setattr(Planner, "take_plans", forgetful)


# What is named, and when.


def approximate_blocks_get_exact_names(patch: Patch) -> None:
    patch.setattr(TrackedRequest, "exact_ends", (TO_THE_END, TO_THE_END))


def the_block_at_a_plans_start_gets_an_exact_name(patch: Patch) -> None:
    ends = TrackedRequest.exact_ends.fget  # type: ignore[attr-defined]
    patch.setattr(
        TrackedRequest,
        "exact_ends",
        property(lambda self: tuple(min(it + SIZE, TO_THE_END) for it in ends(self))),
    )


def a_plan_stands_behind_a_prefix_of_its_own_step(patch: Patch) -> None:
    state = SegmentBlockPool.prefix_state

    def stale(self: SegmentBlockPool, *args: Any) -> PrefixState:
        return state(self, *args)._replace(fresh=False)

    patch.setattr(SegmentBlockPool, "prefix_state", stale)


def blocks_freed_in_the_step_that_named_them_keep_their_names(patch: Patch) -> None:
    _pretending(patch, SegmentBlockPool, "free_blocks", _fresh=set())


# What an earlier turn has left.


def what_is_taken_of_an_earlier_turn_counts_as_exact(patch: Patch) -> None:
    def by_the_plan(self: TrackedRequest) -> int:
        return TO_THE_END if self.plan is None else self.plan.exact_until

    patch.setattr(TrackedRequest, "exact_until", property(by_the_plan))


def turns_of_other_namespaces_are_taken(patch: Patch) -> None:
    def names(self: Conversations, prompt: Prompt, first: int, last: int) -> Any:
        return ((b"", name) for name in prompt.names(first, last))

    patch.setattr(Conversations, "_names", names)


def what_is_taken_of_an_earlier_turn_has_no_depth(patch: Patch) -> None:
    patch.setattr(LeftBehind, "donor_depth", -1)


# What donates.


def blocks_donate_in_the_step_that_computes_them(patch: Patch) -> None:
    insert = SegmentIndex.insert

    def at_once(self: SegmentIndex, *args: Any, **kwargs: Any) -> None:
        insert(self, *args, **kwargs)
        self.begin_step()

    patch.setattr(SegmentIndex, "insert", at_once)


def evicted_blocks_stay_indexed(patch: Patch) -> None:
    patch.setattr(SegmentIndex, "remove", _nothing)


def a_reset_leaves_the_index(patch: Patch) -> None:
    patch.setattr(SegmentIndex, "clear", _nothing)


def copied_tokens_donate(patch: Patch) -> None:
    def whole(self: Donors, plan: ReusePlan, first_block: int, count: int) -> Any:
        return computed(self, plan, first_block, count) | True

    computed = Donors._computed_whole
    patch.setattr(Donors, "_computed_whole", whole)


def provenance_has_no_bound(patch: Patch) -> None:
    _pretending(patch, Donors, "depths", _max_depth=99)
    _pretending(patch, ContentFinder, "find", _max_depth=99)


def donors_are_moved_from_where_their_block_begins(patch: Patch) -> None:
    find = finder.find_matches

    def rounded(*args: Any) -> Any:
        matches = find(*args)
        pieces = matches.pieces
        return matches._replace(pieces=replace(pieces, position=pieces.position // SIZE * SIZE))

    patch.setattr(finder, "find_matches", rounded)


# Namespaces.


def the_salt_is_not_in_the_namespace(patch: Patch) -> None:
    patch.setattr(arrival, "namespace_key", lambda k, _, *more: namespace_key(k, None, *more))


def only_the_first_extra_key_is_in_the_namespace(patch: Patch) -> None:
    patch.setattr(arrival, "namespace_key", lambda k, *more: namespace_key(k[:1], *more))


def the_adapter_is_not_in_the_namespace(patch: Patch) -> None:
    patch.setattr(arrival, "namespace_key", lambda k, s, _, m: namespace_key(k, s, None, m))


def a_namespace_gives_its_id_back_while_its_blocks_live(patch: Patch) -> None:
    _pretending(patch, NamespaceTable, "release", _is_indexed=lambda _: False)


# Steps, preemptions and resets.


def admission_stays_closed(patch: Patch) -> None:
    begin = StepBudget.begin_step

    def once(self: StepBudget) -> None:
        if not hasattr(self, "closed"):
            begin(self)

    patch.setattr(StepBudget, "begin_step", once)


def a_preempted_request_is_planned_with_its_old_tokens(patch: Patch) -> None:
    patch.setattr(Prompt, "with_tokens", lambda self, _: self)


def a_question_that_vllm_computes_later_has_no_slots(patch: Patch) -> None:
    patch.setattr(SegmentBlockPool, "written_until", lambda *_: 0)


def what_the_pass_has_written_for_a_question_counts_as_computed(patch: Patch) -> None:
    patch.setattr(ReusePlan, "num_supplied", property(lambda it: it.num_restored + it.num_written))


def a_spread_plan_is_forgotten_when_its_request_runs(patch: Patch) -> None:
    allocated = SchedulerSide.allocated

    def again(self: SchedulerSide, request: Any, block_ids: list[int]) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(request, "num_computed_tokens", 0)
            allocated(self, request, block_ids)

    patch.setattr(SchedulerSide, "allocated", again)


def workers_carry_on_with_what_a_reset_has_called_back(patch: Patch) -> None:
    take_step = SchedulerSide.take_step

    def silent(self: SchedulerSide, runs_model: bool) -> Step:
        return take_step(self, runs_model)._replace(called_back=[])

    patch.setattr(SchedulerSide, "take_step", silent)


def a_reset_leaves_alone_what_is_set_aside(patch: Patch) -> None:
    patch.setattr(compat_scheduler, "_call_back", _nothing)


def a_late_word_of_a_plan_that_was_called_back_counts(patch: Patch) -> None:
    patch.setattr(compat_scheduler, "_is_loading", lambda *_: True)


def the_workers_number_is_taken_for_that_of_any_plan(patch: Patch) -> None:
    carried_out = Accounts.carried_out

    def waiting(self: Accounts, tracked: TrackedRequest, *args: Any) -> ReusePlan | None:
        awaited = dict(self._awaited)
        found = carried_out(self, tracked, *args)
        self._awaited = awaited
        return found

    patch.setattr(Accounts, "carried_out", waiting)


def errors_of_ours_reach_vllm(patch: Patch) -> None:
    for hook in ("add", "_decide", "allocated", "finished"):
        patch.setattr(SchedulerSide, hook, getattr(SchedulerSide, hook).__wrapped__)


# Documents of knowledge bases.


class _Unheld:
    """A block pool whose blocks are not held."""

    pin = unpin = staticmethod(_nothing)

    def __init__(self, pool: SegmentBlockPool) -> None:
        self.num_free_blocks, self.references = pool.num_free_blocks, pool.references


def frozen_blocks_are_not_held(patch: Patch) -> None:
    init = FrozenPool.__init__

    def unheld(self: FrozenPool, pool: SegmentBlockPool, *args: Any, **kwargs: Any) -> None:
        init(self, _Unheld(pool), *args, **kwargs)

    patch.setattr(FrozenPool, "__init__", unheld)


def frozen_blocks_have_no_limit(patch: Patch) -> None:
    patch.setattr(frozen_documents, "_frozen_limit", lambda core: core.num_blocks)


def what_is_frozen_was_computed_with_the_kv_of_others(patch: Patch) -> None:
    add = Planner.add

    def reusing(self: Planner, tracked: TrackedRequest) -> None:
        if tracked.bypass == "knowledge_base":
            tracked.mode = Use.REUSE
        add(self, tracked)

    patch.setattr(Planner, "add", reusing)
    patch.setattr(Donors, "depths", lambda self, tracked, first, count: np.zeros(count, np.int32))
    _pretending(patch, Freezing, "part", _is_exact=lambda _: True)


def kv_that_carries_other_text_is_reused(patch: Patch) -> None:
    patch.setattr(
        same_context, "same_context", lambda index, prompt, pieces: np.ones(len(pieces), np.bool_)
    )


# What notices.


def _simulations(first_seed: int, same_context: float = 0.0) -> Callable[[], None]:
    def run() -> None:
        for seed in range(first_seed, first_seed + MOST_SEEDS):
            simulate(seed, requests=60, same_context=same_context)

    return run


def _documents() -> None:
    """Documents are frozen and deleted, in a small pool, beside requests that contain them."""
    for seed in range(4):
        world, dice = World(Setup(28)), Random(seed)
        options = {"segreuse_policy": "shift", "segreuse_min_reused_tokens": SIZE}
        for _ in range(80):
            document = dice.randrange(len(DOCUMENTS))
            tokens = [2, *DOCUMENTS[document]]
            tokens += tokens[-1:] * (-len(tokens) % SIZE)
            ask = Ask(tokens=tokens, keys=("a",), options=dict(options), max_tokens=1)
            match dice.choice(["ingest", "ingest", "ask", "delete"]):
                case "ingest":
                    ask.freeze = FreezeOrder(f"document {document}", 0, 1, 1)
                    world.add(ask)
                case "ask":
                    ask.tokens = world.prompt([(document, 0, 1), (dice.randrange(4), 1, 2)])
                    world.add(ask)
                case "delete":
                    world.unfreeze([f"document {document}"])
            world.step()
            world.check()
        world.drain()


_reset = test_world.test_26_a_late_word_of_a_plan_that_was_called_back_is_not_heard

EXACT_NAME = "has the exact name of histories|reads approximate or foreign KV"
SAME_STEP = "the block is written in the same step"

FAULTS: dict[Callable[[Patch], None], tuple[Callable[[], None], str]] = {
    donors_are_not_pinned: (_simulations(0), SAME_STEP),
    pins_of_plans_without_blocks_stay: (_simulations(3), r"references .* but held are"),
    approximate_blocks_get_exact_names: (_simulations(0), EXACT_NAME),
    the_block_at_a_plans_start_gets_an_exact_name: (_simulations(0), EXACT_NAME),
    a_plan_stands_behind_a_prefix_of_its_own_step: (_simulations(2), "reads positions"),
    blocks_freed_in_the_step_that_named_them_keep_their_names: (
        test_world.test_a_request_preempted_in_the_step_that_scheduled_it_leaves_no_names,
        EXACT_NAME,
    ),
    what_is_taken_of_an_earlier_turn_counts_as_exact: (_simulations(0), f"{EXACT_NAME}|too deep"),
    turns_of_other_namespaces_are_taken: (_simulations(0), "never saw block"),
    what_is_taken_of_an_earlier_turn_has_no_depth: (_simulations(0), "too deep|deeper provenance"),
    blocks_donate_in_the_step_that_computes_them: (_simulations(7), SAME_STEP),
    evicted_blocks_stay_indexed: (_simulations(1), r"block \d+ has no name"),
    a_reset_leaves_the_index: (_simulations(3), "a reset left segments behind"),
    copied_tokens_donate: (_simulations(4), "hold copied tokens, which never donate"),
    provenance_has_no_bound: (_simulations(0), "hold a provenance too deep to donate"),
    donors_are_moved_from_where_their_block_begins: (
        _simulations(0),
        "other positions than planned",
    ),
    the_salt_is_not_in_the_namespace: (_simulations(0), "is known to|never saw block"),
    only_the_first_extra_key_is_in_the_namespace: (_simulations(0), "is known to|never saw block"),
    the_adapter_is_not_in_the_namespace: (_simulations(0), "is known to|never saw block"),
    a_namespace_gives_its_id_back_while_its_blocks_live: (_simulations(1), "never saw block"),
    admission_stays_closed: (_simulations(0), "free queue"),
    a_preempted_request_is_planned_with_its_old_tokens: (_simulations(2), "other tokens"),
    a_question_that_vllm_computes_later_has_no_slots: (_simulations(2), "is out of bounds"),
    what_the_pass_has_written_for_a_question_counts_as_computed: (
        _simulations(0),
        "where the plan ends|its plan ended at",
    ),
    a_spread_plan_is_forgotten_when_its_request_runs: (_simulations(0), f"{EXACT_NAME}|too deep"),
    workers_carry_on_with_what_a_reset_has_called_back: (_reset, "its plan ended at"),
    a_reset_leaves_alone_what_is_set_aside: (_reset, "Failed to reset KV cache"),
    a_late_word_of_a_plan_that_was_called_back_counts: (_reset, "^$"),  # vLLM asserts
    the_workers_number_is_taken_for_that_of_any_plan: (
        _simulations(19),
        "reports|'recomputed_tokens': -",
    ),
    errors_of_ours_reach_vllm: (_simulations(3), "InjectedError"),
    kv_that_carries_other_text_is_reused: (_simulations(0, 0.6), "carries"),
    frozen_blocks_are_not_held: (_documents, r"references .* but held are"),
    frozen_blocks_have_no_limit: (_documents, "the longest request does not fit beside frozen"),
    what_is_frozen_was_computed_with_the_kv_of_others: (_documents, "hold copied tokens"),
}
"""How each is noticed: what runs, and what it fails with. Seeds are those that are quick."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    run, message = FAULTS[fault]
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        run()


def test_documents_without_a_fault_run_to_their_end() -> None:
    """As the simulations and the worlds do in their own tests."""
    _documents()
