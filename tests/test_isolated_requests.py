# SPDX-License-Identifier: Apache-2.0
"""A request with documents waits for them, or ends; it never runs as it is."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from segreuse_extras.trained.anchors import Anchors
from segreuse_extras.trained.layout import Layout
from segreuse_extras.trained.requests import IsolatedRequests, private_keys
from tests.parts import parts_of
from tests.test_scheduler import World as Scheduled
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.engine.kv_slots import KvSlots
from vllm_segreuse.features.knowledge.frozen import FrozenPart
from vllm_segreuse.plan import PlanOutcome, ReusePlan
from vllm_segreuse.scheduling.tracked import Method, TrackedRequest

LAYOUT = Layout(100, 101, ((), ()))
SIZE = 4
PROMPT = [1, 2, 100, 5, 6, 101, 3]
WITH_DOCUMENTS = [1, 2, *range(100, 102), 3, 100, *range(20, 30), 101, 9, 9]


class World:
    """One document is resident as blocks 7 and 8, if they are known in the namespace."""

    def __init__(self, max_tokens: int = 99, layout: Layout = LAYOUT, ahead: int = 1) -> None:
        self.resident, self.known = False, True
        self.pinned: list[int] = []
        index: Any = SimpleNamespace(
            block_size=SIZE, missing=lambda namespace, blocks: np.arange(0 if self.known else 1)
        )
        pool: Any = self
        self.entries: dict[tuple[str, int], list[FrozenPart]] = {}
        entries: Any = SimpleNamespace(compressed=lambda *key: self.entries.get(key))
        self.requests = IsolatedRequests(
            layout, pool, index, entries, KvSlots(ahead, max_tokens), capacity=9
        )

    def resident_blocks(self, request: Request, first: int, last: int) -> Any:
        return np.full(last - first, 7 if self.resident else -1, np.int32)

    def pin(self, block_ids: list[int]) -> None:
        self.pinned += block_ids

    def unpin(self, block_ids: list[int]) -> None:
        for block in block_ids:
            self.pinned.remove(block)

    def arrive(self, prompt: list[int]) -> Request:
        request = Request(
            "mine",
            prompt,
            SamplingParams(),
            None,
            block_hasher=lambda it: [b"x"] * len(it.all_token_ids[::SIZE]),
        )
        if self.requests.arrived(request):
            self.finder = self.requests.finder(request, ("one", "two"), 3, b"mine")
        return request


def test_a_request_waits_until_its_documents_are_there() -> None:
    world = World()
    request = world.arrive(PROMPT)
    assert world.requests.needs_plan(request, 0)
    assert not world.requests.needs_plan(request, 6)
    assert world.requests.waits(request, 0, None)
    (alone,) = world.requests.cold.take()
    assert alone.prompt_token_ids == [100, 5, 6, 101, 101]
    assert alone.sampling_params.extra_args == {"extra_keys": ["one", "two"]}
    assert not world.requests.arrived(alone), "or it would wait for itself"
    world.requests.ended(alone, [7, 9])
    assert world.pinned == [7], "the block behind the document holds nothing of it"
    assert not world.requests.waits(request, 0, None)
    assert world.requests.take_failed() == []
    world.requests.ended(request, [])
    assert world.pinned == []
    assert not world.requests.needs_plan(request, 0)


def test_documents_of_other_namespaces_are_not_there() -> None:
    world = World()
    world.resident, world.known = True, False
    assert world.requests.waits(world.arrive(PROMPT), 0, None)
    assert len(world.requests.cold.take()) == 1


def test_what_was_computed_for_the_request_is_its_own_whatever_the_index_knows() -> None:
    world = World()
    world.resident, world.known = True, False
    request = world.arrive(PROMPT)
    world.requests.waits(request, 0, None)
    (alone,) = world.requests.cold.take()
    world.requests.ended(alone, [8, 9])
    assert not world.requests.waits(request, 0, None)
    found = world.finder.find(Prompt(0, np.zeros(7, np.int32)), 0, 7)
    assert found.pieces.rows() == [[2, 4, 8, 0, 0]]


def test_a_request_that_never_fits_ends_at_once() -> None:
    world = World(max_tokens=99)
    request = world.arrive([1, 100, *[5] * 30, 101, 3])
    assert world.requests.waits(request, 0, None)
    assert world.requests.take_failed() == ["mine"]
    assert world.requests.cold.take() == []


@pytest.mark.parametrize(("ahead", "fits"), [(1, True), (25, True), (26, False)])
def test_drafts_take_blocks_beside_the_documents(ahead: int, fits: bool) -> None:
    """Of nine blocks its document takes one, and its seven tokens with what is ahead the rest."""
    world = World(ahead=ahead)
    assert world.requests.waits(world.arrive(PROMPT), 0, None)
    assert (world.requests.take_failed() == []) is fits


@pytest.mark.parametrize("prompt", [[1, 101, 2], [100, 5], [100, 101, 100, 101, 100, 101, 1]])
def test_a_prompt_of_another_layout_ends(prompt: list[int]) -> None:
    world = World()
    request = Request("mine", prompt, SamplingParams(), None)
    assert world.requests.arrived(request)
    assert world.requests.needs_plan(request, 0)
    assert world.requests.waits(request, 0, None)
    assert world.requests.take_failed() == ["mine"]


def test_what_cannot_reuse_ends() -> None:
    world = World()
    world.resident = True
    request = world.arrive(PROMPT)
    assert world.requests.waits(request, 0, "prompt_logprobs")
    assert world.requests.take_failed() == ["mine"]
    world.requests.ended(request, [])
    assert world.requests.take_failed() == []


def test_a_document_that_is_too_long_ends_its_request() -> None:
    assert World(max_tokens=6).arrive(PROMPT)
    world = World(max_tokens=5)
    world.arrive(PROMPT)
    assert world.requests.take_failed() == ["mine"]


def test_text_without_documents_is_none_of_it() -> None:
    world = World()
    assert not world.requests.needs_plan(world.arrive([1, 2, 3]), 0)


def test_private_keys_are_nobodys() -> None:
    assert private_keys() != private_keys()


# Compressed documents.

COMPRESSED = Layout(100, 101, ((), ()), Anchors(4, (140, 141)))
ANCHORED = [1, 2, 100, 140, 141, 101, 100, 140, 101, 3]


def name(world: World, *names: str, prompt: list[int] = ANCHORED) -> TrackedRequest:
    request = Request("mine", prompt, SamplingParams(), None)
    assert world.requests.arrived(request)
    assert world.requests.has_documents("mine")
    no_contexts = np.zeros((0, 2), np.uint64)
    searched = Prompt(3, np.array(prompt, np.int32), contexts=lambda blocks: no_contexts)
    unused: Any = None
    tracked: Any = TrackedRequest("mine", searched, Method("link", unused, unused))
    world.requests.name(tracked, request, names)
    tracked.request = request
    return tracked  # type: ignore[no-any-return]


def frozen(world: World) -> None:
    for entry, block, tokens in (("a", 5, [100, 140, 141, 101]), ("b", 6, [100, 140, 101])):
        world.entries[entry, 3] = [FrozenPart(3, [block], None, np.array(tokens, np.int32))]


def test_documents_that_are_named_are_those_of_their_entries() -> None:
    world = World(layout=COMPRESSED)
    frozen(world)
    assert world.requests.compressed
    tracked: Any = name(world, "a", "b")
    assert not world.requests.waits(tracked.request, 0, None)
    found = tracked.method.finder.find(tracked.prompt, 0, 9)
    assert found.pieces.rows() == [[2, 4, 5, 0, 0], [6, 3, 6, 0, 0]]
    assert tracked.method.finder.is_exact
    assert tracked.exact_stop == 2, "anchors of all documents look alike"
    assert world.requests.take_failed() == []


@pytest.mark.parametrize(
    "names", [("a",), ("a", "b", "b"), ("b", "a"), ("a", "unknown"), ()], ids=str
)
def test_other_documents_than_those_of_the_prompt_end_the_request(names: tuple[str, ...]) -> None:
    world = World(layout=COMPRESSED)
    frozen(world)
    tracked: Any = name(world, *names)
    assert world.requests.waits(tracked.request, 0, None)
    assert world.requests.take_failed() == ["mine"]
    assert world.requests.cold.take() == [], "there is no text to compute"


def test_a_named_document_of_another_namespace_is_not_there() -> None:
    world = World(layout=COMPRESSED)
    frozen(world)
    world.entries["a", 4] = world.entries.pop(("a", 3))
    tracked: Any = name(world, "a", "b")
    assert world.requests.waits(tracked.request, 0, None)
    assert world.requests.take_failed() == ["mine"]


# A plan that failed.


def admitted(world: Scheduled, request: Request) -> ReusePlan:
    """A request's documents are computed, and it is admitted."""
    while world.match(request, 0) is None:
        for alone in parts_of(world.side).isolated.cold.take():
            world.ends_with = RequestStatus.FINISHED_LENGTH_CAPPED
            world.side.add(alone)
            world.run(alone)
            world.ends_with = None
    world.run(request)
    [plan] = world.plans
    return plan


def test_every_plan_of_a_request_is_checked() -> None:
    """Documents that were computed in their places are wrong, whenever that was."""
    world = Scheduled(layout=LAYOUT)
    request = world.add(WITH_DOCUMENTS)

    def report(plan: ReusePlan, computed: int) -> None:
        outcomes = {request.request_id: PlanOutcome(computed)}
        world.side.reported({}, outcomes, {request.request_id: request})

    first = admitted(world, request)
    report(first, int(first.recipe.always.sum()))
    for _ in range(2):
        request.num_preemptions += 1
        resumed = admitted(world, request)
    assert resumed.num_reused == 14
    report(resumed, int(resumed.recipe.always.sum()))
    assert world.side.take_failed() == []
    report(resumed, resumed.num_written)
    assert world.side.take_failed() == [request.request_id]


def test_a_plan_is_checked_although_an_error_has_bypassed_its_request_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Scheduled(layout=LAYOUT)
    request = world.add(WITH_DOCUMENTS)

    def failing(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.side.parts.accounts, "admitted", failing)
    plan = admitted(world, request)
    outcomes = {request.request_id: PlanOutcome(plan.num_written)}
    world.side.reported({}, outcomes, {request.request_id: request})
    assert world.side.take_failed() == [request.request_id]


def test_an_error_over_its_documents_ends_a_request_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Scheduled(layout=LAYOUT)
    request = world.add(WITH_DOCUMENTS)

    def failing(*_: Any) -> bool:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(parts_of(world.side).isolated, "waits", failing)
        assert world.match(request, 0) is None
    assert world.side.take_failed() == [request.request_id]
    assert world.match(request, 0) is None, "it never runs as it is"
