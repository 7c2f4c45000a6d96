# SPDX-License-Identifier: Apache-2.0
"""Layers that hand a state on, by the default policy: segments that the question looks up are read
again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from segreuse_extras.states.catalogue import MapCatalogue
from segreuse_extras.states.layers import HeldStates
from segreuse_extras.states.prefill import CarriedOut, StatesPrefill
from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, after_preemption, drain, step, submit
from tests.e2e.test_composed_states import (
    LENGTHS,
    NOISE,
    SHAPE,
    World,
    check,
    plain_arguments,
    texts,
)
from tests.e2e.test_equality import assert_same
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill.proofs.scratch import relative_error

pytestmark = pytest.mark.patches("gdn_attention")

GAPS = 91, 13, 75
"""Of `World.again`: in front of, between and behind the documents."""
TOTAL = sum(GAPS) + sum(LENGTHS)
CLOSE = 0.03
"""Of norms: the same tokens, read in chunks that end elsewhere."""


class Left(NamedTuple):
    """What a plan has left for vLLM's step: states, and keys and values of its tokens by layer."""

    plan: ReusePlan
    carried: CarriedOut
    states: HeldStates
    kv: list[torch.Tensor]

    def off(self, other: Left, first: int, stop: int) -> float:
        """How far KV of some positions is from that of another plan, at the worst layer."""
        parts = zip(self.kv, other.kv, strict=True)
        return max(relative_error(mine[first:stop], it[first:stop]) for mine, it in parts)

    def states_off(self, other: Left) -> float:
        """The same of states, and of what is kept of short convolutions."""
        both = zip(self.states, other.states, strict=True)
        return max(
            relative_error(mine, theirs)
            for pair in both
            for mine, theirs in zip(*pair, strict=True)
        )


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Also knows the answers of plain vLLM to prompts of this module."""
    with engine(SHAPE, segreuse=False, **plain_arguments(SHAPE)) as plain:
        _, _, prompt, again = texts(plain.vocab_size)
        full = plain.ask(prompt, again, *(around(plain.vocab_size, *it) for it in OTHERS))
    with engine(SHAPE) as running:
        yield World(full, running)
        check(running)


LONG, BEHIND_PREFIX = OTHERS = (50, 21, 420), (400, 13, 75)
"""Gaps of prompts: of one whose question vLLM reads in several steps, since it ends one at a
block's end; and of one that begins with a whole block."""


def around(vocab_size: int, *gaps: int) -> list[int]:
    """Both documents, and other text."""
    documents, *_ = texts(vocab_size)
    return Prompts(vocab_size, seed=9).around(*documents, gaps=gaps)


@pytest.fixture(autouse=True)
def _forgotten(world: World) -> Iterator[None]:
    world.running.reset()
    world.read()
    yield
    check(world.running)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Left]:
    """What plans leave, one after the other."""
    found, carry_out = list[Left](), StatesPrefill.carry_out

    def noted(prefill: StatesPrefill, plan: ReusePlan) -> CarriedOut:
        carried = carry_out(prefill, plan)
        kv = [
            part.tokens(typed_pages(it.attention)[plan.block_ids.tolist()])[: plan.stop].clone()
            for it in prefill.kv
            for part in (it.layout.keys, it.layout.values)
        ]
        states = prefill.state_layers.held(prefill.given[plan.request_id].running)
        found.append(Left(plan, carried, states, kv))
        return carried

    monkeypatch.setattr(StatesPrefill, "carry_out", noted)
    return found


Choose = Callable[[Sequence[int]], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Have these segments chosen, whatever the question looks up."""

    def choosing(numbers: Sequence[int]) -> None:
        name = "segreuse_extras.states.prefill.chosen"
        monkeypatch.setattr(name, lambda *_: [*numbers])

    return choosing


def asked(running: Engine, prompt: list[int], **options: Any) -> Answer:
    named = {f"segreuse_{name}": value for name, value in options.items()}
    [found] = running.ask(prompt, options=NAMESPACE | named)
    return found


@pytest.mark.shows("states", family=SHAPE)
def test_all_read_again_answers_as_plain_vllm(
    world: World, left: list[Left], choose: Choose
) -> None:
    choose([0, 1])
    found = asked(world.running, world.again)
    assert found.report["reused_tokens"] == found.report["recomputed_tokens"] == sum(LENGTHS)
    assert_same(found, world.full[1], NOISE)
    world.running.reset()
    world.read()
    in_order = asked(world.running, world.again, recompute_ratio=1)
    assert_same(in_order, world.full[1], NOISE)
    again, whole = left
    assert [it.segment for it in again.carried.read]
    assert whole.carried.read == ()
    assert again.states_off(whole) < CLOSE
    assert again.off(whole, 0, again.plan.stop) < CLOSE


def test_what_is_chosen_is_as_if_it_had_not_been_reused(
    world: World, left: list[Left], choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV of the first document is that of full prefill then; the state behind it is composed by
    the map of the second one."""
    choose([0])
    asked(world.running, world.again)
    stop = GAPS[0] + LENGTHS[0]
    assert [it.first for it in left[0].carried.read] == [GAPS[0]]
    assert left[0].carried.twice == GAPS[1]
    find = MapCatalogue.find

    def only_the_second(*given: Any) -> Any:
        return [it for it in find(*given) if it.first > stop]

    for patch, options in ((only_the_second, {"policy": "shift"}), (find, {"recompute_ratio": 1})):
        world.running.reset()
        world.read()
        monkeypatch.setattr(MapCatalogue, "find", patch)
        asked(world.running, world.again, **options)
        monkeypatch.setattr(MapCatalogue, "find", find)
    one, never, whole = left
    assert one.off(whole, 0, stop) < CLOSE
    assert one.off(never, 0, one.plan.stop) < CLOSE
    assert one.states_off(never) < CLOSE
    second = stop + GAPS[1], one.plan.stop
    assert one.off(whole, *second) > CLOSE, "it is moved"


def test_nothing_chosen_is_shift(world: World, left: list[Left], choose: Choose) -> None:
    """The question was read all the same."""
    choose([])
    found = asked(world.running, world.again)
    assert found.report["recomputed_tokens"] == 0
    assert found.report["computed_share"] == round((sum(GAPS) + GAPS[2]) / TOTAL, 4)
    for options in ({"policy": "shift"}, {"recompute_ratio": 0.1}):
        world.running.reset()
        world.read()
        shifted = asked(world.running, world.again, **options)
        assert shifted.report["computed_share"] == round(sum(GAPS) / TOTAL, 4)
        assert_same(found, shifted, 1e-3)
    first, second, third = left
    assert len(first.plan.suffix) == GAPS[2]
    assert not len(second.plan.suffix)
    assert first.states_off(second) == first.off(second, 0, first.plan.stop) == 0
    assert third.states_off(second) == 0


def test_one_of_two_documents_is_read_again_and_counted(world: World, left: list[Left]) -> None:
    """By what the question looks up, where the longer one is above half of what is reused."""
    found = asked(world.running, world.again)
    [carried_out] = left
    [read] = carried_out.carried.read
    assert read.stop - read.first == min(LENGTHS)
    assert found.report["policy"] == "focus"
    assert found.report["recomputed_tokens"] == min(LENGTHS)
    twice = GAPS[1] if read.first == GAPS[0] else 0
    computed = sum(GAPS) + min(LENGTHS) + twice + GAPS[2]
    assert found.report["computed_share"] == round(computed / TOTAL, 4)
    assert found.cached_tokens == max(LENGTHS)


def test_a_question_that_takes_several_steps(
    world: World, left: list[Left], choose: Choose
) -> None:
    prompt = around(world.running.vocab_size, *LONG)
    choose([0, 1])
    submit(world.running, "long", prompt, NAMESPACE)
    steps = 1
    while not (answers := step(world.running)):
        steps += 1
    assert steps > 4, "that are more than tokens of the answer"
    [found] = answers.values()
    assert found.report["recomputed_tokens"] == sum(LENGTHS)
    assert [len(it.carried.read) for it in left] == [2], "nothing was computed in full"
    assert_same(found, world.full[2], NOISE)


def test_behind_a_prefix_hit(world: World, choose: Choose) -> None:
    running = world.running
    prompt = around(running.vocab_size, *BEHIND_PREFIX)
    asked(running, prompt[: BEHIND_PREFIX[0]])
    choose([0, 1])
    found = asked(running, prompt)
    whole_blocks = BEHIND_PREFIX[0] // world.block_size
    assert found.report["prefix_tokens"] == whole_blocks * world.block_size > 0
    assert found.report["recomputed_tokens"] == sum(LENGTHS)
    assert_same(found, world.full[3], NOISE)


def test_where_they_were_read_nothing_is_read_again(world: World) -> None:
    world.forget_prefix(len(world.prompt))
    found = asked(world.running, world.prompt)
    assert found.report["reused_tokens"] == sum(LENGTHS)
    assert found.report["recomputed_tokens"] == 0
    assert_same(found, world.full[0], NOISE)


def test_what_is_read_again_is_no_prefix(world: World, choose: Choose) -> None:
    """Neither its KV nor a state is found by a request that reuses nothing."""
    choose([0])
    asked(world.running, world.again)
    [plain] = world.running.ask(world.again)
    assert plain.cached_tokens == 0
    assert_same(plain, world.full[1], NOISE)


def test_preempted_and_aborted_requests(world: World, choose: Choose) -> None:
    choose([0, 1])
    running = world.running
    for steps in range(3):
        name = submit(running, f"a{steps}", world.again, NAMESPACE, max_tokens=9)
        for _ in range(steps):
            step(running)
        abort(running, name)
        drain(running)
        check(running)
    for steps in (1, 2):
        found = after_preemption(running, f"p{steps}", world.again, NAMESPACE, steps)
        assert_same(found, world.full[1], NOISE)


def test_what_is_no_number_is_computed_in_full(
    world: World, left: list[Left], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question has read spoilt KV before, and left it in its slots."""
    compose = StatesPrefill.go_on

    def spoilt(prefill: StatesPrefill, plan: ReusePlan, *given: Any) -> bool:
        if plan.recipe.program.chooses:
            for it in prefill.kv:
                typed_pages(it.attention)[plan.block_ids.tolist()] = torch.nan
        return compose(prefill, plan, *given)

    monkeypatch.setattr(StatesPrefill, "go_on", spoilt)
    found = asked(world.running, world.again)
    assert [it.carried.finite for it in left] == [False, True]
    assert found.report["recomputed_tokens"] == sum(LENGTHS)
    assert np.isfinite([*found.logprobs[0].values()]).all()
    assert_same(found, world.full[1], NOISE)
