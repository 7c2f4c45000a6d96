# SPDX-License-Identifier: Apache-2.0
"""A step's plans: each by its own program, whatever else is computed beside it, and computed again
in full if it meets NaN or infinity."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.hooks import pre_hooks
from tests.prefill.loop import TinyDecoder, carry_out
from tests.prefill.tiny import LAYERS, SIZE, World, make_plan
from vllm_segreuse.kernels import reference
from vllm_segreuse.plan import (
    Boundary,
    Deviation,
    Fixed,
    Gather,
    PlanOutcome,
    Probed,
    ReusePlan,
    Stock,
)
from vllm_segreuse.prefill import executor
from vllm_segreuse.prefill.carried import carries
from vllm_segreuse.prefill.chunks import Chunks, finish
from vllm_segreuse.prefill.executor import PassReport

NAN, INF = float("nan"), float("inf")
DONOR = 90
"""First block of the donors; plans have lower ones."""
PEAK = {"program": Probed(Gather.MAX, 0.3), "top_k": 5}
RECIPES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "dense": {"program": Fixed(2)},
    "boundary": {"program": Boundary(), "top_k": 5},
    "hybrid": {"program": Boundary(1), "top_k": 5},
    "deviation": {"program": Deviation(1), "top_k": 5},
    "sum": {"program": Probed(Gather.SUM), "top_k": 5},
    "late": {"program": Probed(Gather.SUM_AND_LAST, first_layer=2), "top_k": 5},
    "carried": {
        "program": Probed(Gather.SUM_AND_LAST, first_layer=2, carries=True),
        "top_k": 5,
    },
    "peak": PEAK,
    "stock": {"program": Stock()},
}


def plan(name: str, first_block: int, donor: int = DONOR, **recipe: Any) -> ReusePlan:
    """20 tokens behind a prefix hit of 4, the first, the tenth and the last two of them new."""
    pieces = [(5, 8, donor, 0, 0), (14, 8, donor + 2, 0, 60)]
    blocks = np.arange(first_block, first_block + 6)
    return make_plan(name, 4, [0, 9, 18, 19], 20, blocks, pieces=pieces, **recipe)


def pair(recipe: dict[str, Any]) -> list[ReusePlan]:
    """Two plans of one program that read different donors."""
    return [plan("one", 10, DONOR, **recipe), plan("other", 30, DONOR + 4, **recipe)]


def pages(world: World, plan: ReusePlan) -> list[torch.Tensor]:
    """What the plan's blocks hold, by layer."""
    return [cache[plan.block_ids.tolist()].clone() for cache in world.caches]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], atol: float = 0) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=0)


def spoils_donor(part: int, layer: int, value: float) -> Callable[[World], None]:
    """The key (0) or value (1) of one of the tokens that `one` reuses."""

    def spoil(world: World) -> None:
        world.caches[layer][DONOR, part, :, 2] = value

    return spoil


def spoils_state(number: int, value: float) -> Callable[[World], None]:
    """Hidden states (0) or residual (1) of a token of `one` as it enters the last layer."""

    def spoil(world: World) -> None:
        def left(index: int, positions: torch.Tensor, *state: torch.Tensor) -> None:
            if index == LAYERS - 2 and all(layer < LAYERS - 1 for layer, _ in world.written):
                assert positions[0] == 4
                state[number][1, 3] = value

        world.in_place = False  # or norms would carry it from one to the other
        world.spoil = left

    return spoil


PLACES = {
    f"{name} of a donor, layer {layer}": (part, layer)
    for part, name in enumerate(("key", "value"))
    for layer in range(LAYERS - 1)
}


def check_spoilt(
    spoil: Callable[[World], None], recipe: dict[str, Any], patch: pytest.MonkeyPatch
) -> None:
    """`one` meets what is not finite, and `other`, beside it, does not."""
    one, other = pair(recipe)
    clean = World(patch)
    healthy = clean.prefill.run([one, other])
    assert healthy.not_finite == []
    alone = World(patch)
    alone.prefill.run([one.in_full()])

    world = World(patch)
    spoil(world)
    report = world.prefill.run([one, other])
    assert report.not_finite == ["one"]
    assert_equal(pages(world, one), pages(alone, one), atol=1e-4)
    assert_equal(pages(world, other), pages(clean, other))
    assert report.outcomes == healthy.outcomes | {"one": PlanOutcome(20)}
    again = world.layer_tokens - len(one.token_ids) * LAYERS
    assert again <= clean.layer_tokens + 5 * LAYERS, "nobody else is computed again"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_spoilt_donor_is_noticed_wherever_it_is_spoilt(
    place: tuple[int, int], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_spoilt(spoils_donor(*place, value), RECIPES["fixed"], monkeypatch)


@pytest.mark.parametrize("name", ["boundary", "sum", "peak", "stock"])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_every_program_notices_a_spoilt_donor(
    name: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where scores come from what is spoilt, and a token is healed because it is chosen."""
    few = {"top_k": 1} if "top_k" in RECIPES[name] else {}
    check_spoilt(spoils_donor(part, 0, NAN), RECIPES[name] | few, monkeypatch)


def test_scores_that_are_no_numbers_are_noticed_though_the_token_is_healed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With NaN everywhere the first are chosen, and the spoilt one, the third, is one of them."""
    for name in ("boundary", "sum", "peak"):
        check_spoilt(spoils_donor(0, 0, NAN), RECIPES[name] | {"top_k": 4}, monkeypatch)


def test_a_donor_that_is_spoilt_where_layers_are_dense_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of it is copied there."""
    plans, clean, world = pair(RECIPES["dense"]), World(monkeypatch), World(monkeypatch)
    clean.prefill.run(plans)
    world.caches[1][DONOR] = NAN
    copied = []

    def align(layers: list[torch.Tensor], parts: Any, moves: Any) -> None:
        copied.append(len(layers))
        reference.align(layers, parts, moves)

    monkeypatch.setattr(world, "align", align)
    assert world.prefill.run(plans).not_finite == []
    assert_equal(pages(world, plans[0]), pages(clean, plans[0]))
    assert copied == [LAYERS - 2]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("number", [0, 1], ids=["hidden states", "residual"])
@pytest.mark.parametrize("name", ["fixed", "boundary", "peak"])
def test_a_state_that_is_not_finite_is_noticed_by_itself(
    name: str, number: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_spoilt(spoils_state(number, value), RECIPES[name], monkeypatch)


def test_plans_that_reuse_nothing_may_be_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step has memory for as many plans as it was given, as long as these reuse."""
    plans = [plan.in_full() for plan in pair(RECIPES["fixed"])]
    world, other = World(monkeypatch), World(monkeypatch)
    together, apart = (each.prefill.prepare(plans, apart=each is other) for each in (world, other))
    names = [[plan.request_id for plan in batch.plans] for batch in apart.batches]
    assert (len(together.batches), names) == (1, [["one"], ["other"]])
    for each, prepared in ((world, together), (other, apart)):
        finish(each.prefill.compute(prepared))
    for each in plans:
        assert_equal(pages(other, each), pages(world, each), atol=1e-5)


def test_both_plans_may_be_spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = pair(PEAK)
    world, full = World(monkeypatch), World(monkeypatch)
    full.prefill.run([plan.in_full() for plan in plans])
    for block in (DONOR, DONOR + 4):
        world.caches[0][block, 0, :, 1] = NAN
    report = world.prefill.run(plans)
    assert report.not_finite == ["one", "other"]
    assert report.outcomes == {"one": PlanOutcome(20), "other": PlanOutcome(20)}
    for each in plans:
        assert_equal(pages(world, each), pages(full, each), atol=1e-4)


def test_a_plan_in_full_writes_the_suffix_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a spoilt pass left in its slots would spoil the next one."""
    world = World(monkeypatch)
    pieces = [(5, 8, DONOR, 0, 0)]
    new = [0, *range(9, 17)]
    one = make_plan("one", 4, new, 17, np.arange(10, 16), [7, 8, 9], pieces, **PEAK)
    world.caches[0][DONOR, 0, :, 1] = NAN
    report = world.prefill.run([one])
    assert (report.not_finite, report.outcomes) == (["one"], {"one": PlanOutcome(17)})
    assert all(cache[10:16].isfinite().all() for cache in world.caches)


@pytest.mark.parametrize("name", ["fixed", "dense", "sum", "stock"])
def test_in_full_nothing_is_left_of_what_is_no_number_in_front_of_the_next_chunk(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's kernel for CPUs reads a block to its end, of which the next chunk computes a part."""
    world, alone = (World(monkeypatch, scattered=False, max_chunk_tokens=7) for _ in range(2))
    one = plan("one", 10, **RECIPES[name])
    alone.prefill.run([one.in_full()])
    for cache in world.caches:
        cache[DONOR : DONOR + 2] = NAN
    assert world.prefill.run([one]).not_finite == ["one"]
    assert_equal(pages(world, one), pages(alone, one), atol=1e-4)

    world.prefill.prepare([one])  # and after an error, it is prepared in full
    prepared = world.prefill.prepare([one.without_copies()], apart=True)
    assert finish(world.prefill.compute(prepared)).not_finite == []
    assert_equal(pages(world, one), pages(alone, one), atol=1e-4)


def asked_from_behind(recipe: dict[str, Any]) -> ReusePlan:
    """18 tokens, the first and the tenth of them new, and a question that is left to vLLM."""
    pieces = [(5, 8, DONOR, 0, 0), (14, 8, DONOR + 2, 0, 60)]
    blocks = np.arange(10, 16)
    return make_plan("one", 4, [0, 9], 18, blocks, [7, 8], pieces, probes=[], **recipe)


ASKED = ("sum", "late", "peak")


@pytest.mark.parametrize(
    ("name", "layer", "compiled"),
    [
        ("boundary", 0, False),
        *((name, at, False) for name in ASKED for at in range(LAYERS - 1)),
        *((name, LAYERS - 1, True) for name in ASKED),
    ],
)
def test_what_only_the_question_reads_is_noticed_before_vllm_reads_it_again(
    name: str, layer: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last of these layers no score shows what the query has read."""
    world, one = World(monkeypatch), asked_from_behind(RECIPES[name])
    world.run_compiled(compiled)
    left = []

    def spoil_once(index: int, positions: torch.Tensor, *state: torch.Tensor) -> None:
        if index == layer and not left:
            state[1][positions == one.stop] = NAN  # no other token attends to its state by then
            left.append(index)

    world.in_place, world.spoil = False, spoil_once
    assert world.prefill.run([one]).not_finite == ["one"]
    assert all(cache[10:16].isfinite().all() for cache in world.caches)


def test_where_no_score_is_high_enough_only_the_question_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, moved = World(monkeypatch), World(monkeypatch)
    one = asked_from_behind({"program": Probed(Gather.MAX, 2.0), "top_k": 5})
    monkeypatch.setattr(world.layers, "all_layers", None)  # nothing is left to be run
    report = world.prefill.run([one])
    assert (report.not_finite, report.outcomes) == ([], {"one": PlanOutcome(2)})
    assert world.layer_tokens == one.layer_tokens(world.layers.model, chosen=0)
    moved.prefill.run([one.computing(one.recipe.always)])
    expected, found = moved.kv(one), world.kv(one)
    for where in expected:
        np.testing.assert_allclose(found[where], expected[where], atol=1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_copies_and_passes_are_what_the_loop_makes_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    decoder, plans = TinyDecoder(world), pair(RECIPES[name])
    plans[0].explains = True
    expected = []
    for each in plans:
        kv = world.kv(each)
        for to, length, block, offset, _ in each.pieces.rows():
            for i in range(length):
                at = block + (offset + i) // SIZE, (offset + i) % SIZE
                for layer, cache in enumerate(world.caches):
                    kv[layer, to + i] = tuple(cache[at[0], :, :, at[1]].double().numpy())
        expected.append(carry_out(decoder, each, kv))
    report = world.prefill.run(plans)
    for each, (active, left) in zip(plans, expected, strict=True):
        found = world.kv(each)
        for where, pair_of in left.items():
            np.testing.assert_allclose(found[where], pair_of, atol=2e-4)
        if each.reports:
            assert 4 < len(active) <= 9
            outcome = report.outcomes[each.request_id]
            assert outcome.computed == len(active)
            positions = tuple(sorted(active)) if each.explains else None
            assert outcome.positions == positions
    assert report.outcomes.keys() == {p.request_id for p in plans if p.reports}


def test_plans_are_grouped_by_what_their_programs_depend_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    groups = {
        "abc": [{}, {"program": Probed(Gather.MAX, 0.3)}, {"program": Probed(Gather.SUM)}],
        "d": [{"program": Fixed(1)}],
        "ef": [{"top_k": top_k, "program": Boundary()} for top_k in (1, 7)],
        "g": [{"top_k": 1, "program": Boundary(1)}],
        "h": [{"top_k": 1, "program": Deviation(1)}],
        "i": [{"top_k": 1, "program": Probed(Gather.SUM)}],
        "j": [{"top_k": 1, "program": Probed(Gather.MAX)}],
        "kl": [PEAK | {"top_k": 3}, PEAK],
        "m": [{"top_k": 1, "program": Probed(Gather.MAX, 0.2)}],
        "n": [{"program": Stock()}],
    }
    plans = [
        plan(name, 6 * number, **recipe)
        for number, (name, recipe) in enumerate(
            (name, recipe)
            for names, recipes in groups.items()
            for name, recipe in zip(names, recipes, strict=True)
        )
    ]
    mixed = [plans[i] for i in np.random.default_rng(0).permutation(len(plans))]
    prepared = world.prefill.prepare(mixed)
    found = ["".join(sorted(p.request_id for p in batch.plans)) for batch in prepared.batches]
    assert sorted(found) == sorted(groups)
    assert sorted(p.request_id for p in prepared.plans) == sorted("".join(groups))


def test_plans_of_all_programs_in_one_step_do_as_they_do_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = [plan(name, 7 * i, **recipe) for i, (name, recipe) in enumerate(RECIPES.items())]
    together = World(monkeypatch)
    together.prefill.run(plans)
    for each in plans:
        alone = World(monkeypatch)
        alone.prefill.run([each])
        assert_equal(pages(together, each), pages(alone, each), atol=1e-4)


def test_changes_of_a_prompt_of_text_are_carried_whatever_is_computed_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are not where there are images."""
    world, (one, other) = World(monkeypatch), pair(RECIPES["carried"])
    numbers = np.arange(one.start, one.written_until, dtype=np.int32)
    with_images = replace(one, mrope_positions=np.stack((numbers, numbers, numbers)))
    batches = world.prefill.prepare([with_images, other]).batches
    names = [[plan.request_id for plan in batch.plans] for batch in batches]
    assert names == [["one"], ["other"]]
    assert [carries(world.layers, batch) for batch in batches] == [False, True]


def test_nothing_is_computed_before_the_first_chunk_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    prepared = world.prefill.prepare(pair(RECIPES["boundary"]))
    chunks = world.prefill.compute(prepared)
    assert world.written == []
    assert next(chunks) > 0
    assert world.written != []


def in_turns(*running: Chunks[PassReport]) -> list[PassReport]:
    """A chunk of each, until all have ended."""
    left, reports = dict(enumerate(running)), {}
    while left:
        for number, chunks in list(left.items()):
            try:
                next(chunks)
            except StopIteration as end:
                reports[number] = end.value
                del left[number]
    return [reports[number] for number in range(len(running))]


@pytest.mark.parametrize("compiled", [False, True])
def test_passes_may_take_turns(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread plans go on where they were, whatever ran in between."""
    plans = [plan(name, 7 * i, **recipe) for i, (name, recipe) in enumerate(RECIPES.items())]
    worlds = World(monkeypatch), World(monkeypatch)
    for world in worlds:
        world.run_compiled(compiled)
    alone, together = ([w.prefill.prepare([p], 12) for p in plans] for w in worlds)
    reports = [in_turns(worlds[0].prefill.compute(prepared)) for prepared in alone]
    taking_turns = in_turns(*(worlds[1].prefill.compute(prepared) for prepared in together))
    for [one], other in zip(reports, taking_turns, strict=True):
        assert (one.not_finite, one.outcomes) == (other.not_finite, other.outcomes)
    for one, other in zip(*(world.caches for world in worlds), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", RECIPES)
def test_between_chunks_the_model_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_chunk_tokens=5)
    for _ in world.prefill.compute(world.prefill.prepare(pair(RECIPES[name]), 30)):
        assert world.context is None
        for layer, attention in zip(world.stack.layers, world.stack.attention, strict=True):
            assert "forward" not in vars(attention.impl)
            assert not pre_hooks(layer)
            assert not pre_hooks(attention)


@pytest.mark.parametrize("name", RECIPES)
def test_a_chunk_is_no_larger_than_it_may_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in tokens, which memory was profiled for, nor in the work of a spread plan."""
    for max_tokens, work in ((5, None), (1000, 12), (3, 13), (1000, 1)):
        world = World(monkeypatch, max_chunk_tokens=max_tokens)
        plans = pair(RECIPES[name])
        told, seen = [], 0
        for chunk in world.prefill.compute(world.prefill.prepare(plans, work)):
            at_once = max((len(tokens) for _, tokens, _ in world.contexts[seen:]), default=0)
            seen = len(world.contexts)
            assert at_once <= max_tokens
            assert work is None or at_once <= 1 or chunk <= work
            told.append(chunk)
        scored = 0
        program = plans[0].recipe.program
        if isinstance(program, Boundary | Probed):  # attention of probes counts as work, too
            layers = LAYERS - 1 - program.first_layer if isinstance(program, Probed) else 1
            scored = layers * sum(int(p.recipe.probes.sum()) for p in plans)
        assert sum(told) == world.layer_tokens + scored


def test_seconds_are_those_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the copies, and of the chunks without what happens between them."""
    now = 0.0
    monkeypatch.setattr(executor.time, "perf_counter", lambda: now)
    world = World(monkeypatch)

    def passes(seconds: float) -> Callable[..., None]:
        def pass_by(*_: object) -> None:
            nonlocal now
            now += seconds

        return pass_by

    monkeypatch.setattr(world, "align", passes(5))
    world.spoil = passes(1)  # behind each of the layers that is run whole
    prepared = world.prefill.prepare(pair(RECIPES["fixed"]), 12)
    now += 1000
    chunks, count = world.prefill.compute(prepared), 0
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            report: PassReport = end.value
            break
        count += 1
        now += 1000
    assert report.align_s == 5
    assert count > 1
    assert report.sparse_s == count * (LAYERS - 1)


def test_a_plan_without_anything_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """All reused, and the only query is vLLM's."""
    pieces = [(4, 8, DONOR, 0, 0)]
    for recipe in ({}, {"program": Stock()}):
        world = World(monkeypatch)
        all_reused = make_plan("all", 4, [], 8, np.arange(3), pieces=pieces, **recipe)
        beside = plan("beside", 10, **recipe)
        for plans in ([all_reused], [all_reused, beside]):
            report = world.prefill.run(plans)
            assert (report.not_finite, report.outcomes) == ([], {})
            for cache in world.caches:
                assert torch.equal(cache[1:3], cache[DONOR : DONOR + 2])
