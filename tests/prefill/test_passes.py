# SPDX-License-Identifier: Apache-2.0
"""Passes choose and compute what a loop over the papers' equations does, on a decoder that is small
enough for both."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.loop import KV, TinyDecoder, carry_out
from tests.prefill.tiny import CHANNELS, FIXED, HEADS, LAYERS, SIZE, World, make_plan
from vllm_segreuse.kernels import reference
from vllm_segreuse.plan import Boundary, Deviation, Fixed, Gather, Probed, ReusePlan, Staged, Stock
from vllm_segreuse.prefill import programs
from vllm_segreuse.prefill import tokens as tokens_module
from vllm_segreuse.prefill.attention import ScatteredQueries
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.rows import EAGER

CPU = torch.device("cpu")
CARRIES = Probed(Gather.SUM_AND_LAST, first_layer=1, carries=True)
RECIPES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "fixed behind dense layers": {"program": Fixed(2)},
    "everything dense": {"program": Fixed(LAYERS)},
    "boundary": {"program": Boundary(), "top_k": 6},
    "boundary behind one dense layer": {"program": Boundary(1), "top_k": 6},
    "boundary behind all but one": {"program": Boundary(LAYERS - 1), "top_k": 6},
    "deviation": {"program": Deviation(1), "top_k": 6},
    "deviation deeper": {"program": Deviation(LAYERS - 1), "top_k": 6},
    "summed over all layers": {"program": Probed(Gather.SUM), "top_k": 6},
    "summed over late layers": {
        "program": Probed(Gather.SUM_AND_LAST, first_layer=1),
        "top_k": 6,
    },
    "changes carried to others": {
        "program": CARRIES,
        "top_k": 6,
    },
    "segments levelled": {
        "program": Probed(Gather.SUM_AND_LAST, first_layer=1, levelling=0.75),
        "top_k": 6,
    },
    "the highest at any layer": {"program": Probed(Gather.MAX), "top_k": 12},
    "the highest, if it is much": {"program": Probed(Gather.MAX, 0.5), "top_k": 12},
    "stages": {"program": Staged((1, 3))},
    "stock": {"program": Stock()},
}


def plans_of(recipe: dict[str, Any]) -> list[ReusePlan]:
    """Three plans: from the beginning; behind a prefix hit, with a question of three tokens behind
    it; and one whose probes are some of what is always computed."""
    blocks = np.random.default_rng(1).permutation(100)
    suffix = [7, 3, 1] if recipe.get("program", FIXED).probes_suffix else []
    return [
        make_plan("first", 0, [0, 1, 20, 21, 22, 29], 30, blocks[:10], **recipe),
        make_plan("hit", 8, [0, 9, 25], 26, blocks[10:20], suffix, **recipe),
        make_plan("odd", 5, [*range(3, 9), 22], 23, blocks[20:28], probes=[8, 22], **recipe),
    ]


def dense_layers_of(recipe: dict[str, Any]) -> int:
    return recipe.get("program", FIXED).dense_layers


def carried_out(world: World, plans: list[ReusePlan], chunk_work: int | None = None):
    """Run plans of one program.

    Returns:
        What was yielded, and the active positions of each plan.
    """
    batch = Batch(plans, SIZE, CPU, chunk_work)
    chunks, work = programs.run(world.layers, batch), []
    with torch.inference_mode():
        while True:
            try:
                work.append(next(chunks))
            except StopIteration as end:
                active, _ = end.value
                break
    request, positions = batch.tokens.request[active], batch.tokens.positions[active]
    return work, [sorted(positions[request == row].tolist()) for row in range(len(plans))]


def assert_holds(world: World, plan: ReusePlan, expected: KV) -> None:
    found = world.kv(plan)
    assert found.keys() == expected.keys()
    for where, (key, value) in expected.items():
        np.testing.assert_allclose(found[where][0], key, atol=2e-4, err_msg=f"key of {where}")
        np.testing.assert_allclose(found[where][1], value, atol=2e-4, err_msg=f"value of {where}")


@functools.cache
def by_the_loop(name: str, windows: tuple[int, ...]) -> list[tuple[list[int], KV]]:
    """What `carry_out` says of each plan; all worlds begin alike."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch, windows=windows)
        decoder = TinyDecoder(world)
        return [carry_out(decoder, plan, world.kv(plan)) for plan in plans_of(RECIPES[name])]


def check(world: World, name: str) -> None:
    """Compare the passes of a recipe with the loop."""
    recipe = RECIPES[name]
    plans = plans_of(recipe)
    before = [world.kv(plan) for plan in plans]
    caches = [cache.clone() for cache in world.caches]
    _, active = carried_out(world, plans)
    looped = by_the_loop(name, tuple(kind.window for kind in world.kinds))
    for plan, kv, found, expected in zip(plans, before, active, looped, strict=True):
        assert found == expected[0]
        assert_holds(world, plan, expected[1])
        left, rest = world.kv(plan), set(range(plan.stop)) - set(found)
        last = LAYERS - 1 if recipe.get("program", FIXED) == CARRIES else 0
        for layer, p in itertools.product(range(max(last, dense_layers_of(recipe)), LAYERS), rest):
            assert (left[layer, p][0] == kv[layer, p][0]).all(), "reused as it was"
    others = np.setdiff1d(np.arange(100), np.concatenate([plan.block_ids for plan in plans]))
    for cache, saved in zip(world.caches, caches, strict=True):
        assert torch.equal(cache[others], saved[others]), "not a plan's"


def test_the_last_queries_of_each_plan_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the plans has fewer. Each is asked once."""
    asked, token_scores = [], reference.token_scores

    def noted(query: torch.Tensor, *given: Any, last: int, **more: Any) -> torch.Tensor:
        asked.append((len(query), last))
        return token_scores(query, *given, last=last, **more)

    monkeypatch.setattr(reference, "token_scores", noted)
    world = World(monkeypatch)
    batch = Batch(plans_of(RECIPES["summed over late layers"]), SIZE, CPU)
    queries = torch.randn(len(batch.probes), HEADS, CHANNELS)

    def paid(first: int, stop: int) -> torch.Tensor:
        part, gather = slice(first, stop), Gather.SUM_AND_LAST
        return world.layers.attention_scores(batch, 1, part, queries[part], gather)

    assert batch.counts(batch.probes) == [6, 6, 2]
    every, by_last = paid(0, 14)
    assert asked == [(6, 4), (6, 4), (2, 2)]
    torch.testing.assert_close(by_last, (paid(2, 6) + paid(8, 12) + paid(12, 14))[0])
    in_chunks = paid(0, 4) + paid(4, 9) + paid(9, 14)
    torch.testing.assert_close(in_chunks, torch.stack([every, by_last]))


@pytest.mark.parametrize("scattered", [True, False], ids=["kernel", "rows"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_pass_does_what_the_loop_does(
    name: str, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, scattered)
    check(world, name)
    assert any(by_kernel(world)) == (scattered and name not in ("stock", "everything dense"))


def by_kernel(world: World) -> list[bool]:
    """Of each context, whether a layer's queries were scattered."""
    return [
        isinstance(metadata, dict)
        and any(isinstance(of_layer, ScatteredQueries) for of_layer in metadata.values())
        for metadata, _, _ in world.contexts
    ]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("windows", [(5, 0, 5, 0), (0, 7, 3, 5), (5, 5, 0, 5)], ids=str)
@pytest.mark.parametrize("scattered", [True, False], ids=["kernel", "rows"])
def test_layers_with_windows(
    name: str, windows: tuple[int, ...], scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(World(monkeypatch, scattered, windows=windows), name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "name", ["boundary", "summed over all layers", "fixed behind dense layers"]
)
def test_layers_without_a_kernel_attend_in_rows_beside_others(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, windows=(5, 0, 5, 0), in_rows=(1, 2))
    world.run_compiled(compiled)
    check(world, name)
    assert any(by_kernel(world))
    assert world.in_rows


PROBING = [
    name
    for name, recipe in RECIPES.items()
    if recipe.get("program", FIXED).probes_suffix and not dense_layers_of(recipe)
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("windows", [(0,) * LAYERS, (5, 5, 0, 5)], ids=str)
@pytest.mark.parametrize("name", PROBING)
def test_a_forward_behind_the_pass_reads_the_question_as_a_second_reading_in_it(
    name: str, windows: tuple[int, ...], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, blocks = [17, 18, 19, 20, 21], np.random.default_rng(2).permutation(100)[:8]
    whole = make_plan(
        "one", 8, [0, 12, *question], 22, blocks, [7], probes=question, **RECIPES[name]
    )
    left, worlds = whole.leaving_suffix(), (World(monkeypatch, windows=windows) for _ in range(2))
    assert (left.stop, len(left.suffix)) == (8 + 17, 6)
    active, kv = [], []
    for world, plan in zip(worlds, (whole, left), strict=True):
        world.run_compiled(compiled)
        active.append(carried_out(world, [plan])[1][0])
        kv.append(world.kv(plan))
    assert active[0] == [*active[1], *range(left.stop, whole.stop)], "the choice is the same"
    decoder = TinyDecoder(world)
    states = {
        left.stop + i: decoder.embed(int(token), left.stop + i)
        for i, token in enumerate(left.suffix)
    }
    decoder.run(range(LAYERS), states, kv[1])
    for where, expected in kv[0].items():
        np.testing.assert_allclose(kv[1][where], expected, atol=3e-4, err_msg=str(where))


@pytest.mark.parametrize("name", RECIPES)
def test_chunks_of_few_tokens_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(World(monkeypatch, max_chunk_tokens=7), name)


@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_model_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.run_compiled()
    check(world, name)
    whole = not dense_layers_of(RECIPES[name]) and name != "stages"
    assert world.contexts[-1][2].compiled == whole, "only whole models are compiled"


@pytest.mark.parametrize("most", [7, 1000], ids=["chunks", "at once"])
@pytest.mark.parametrize("scattered", [True, False], ids=["kernel", "rows"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_pass_by_cuda_graphs_gives_the_same(
    name: str, scattered: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, scattered, max_chunk_tokens=most)
    world.capture(4, 8, 16)
    check(world, name)
    assert world.captured is not None
    assert set(world.captured.token_ids.tolist()) == {7}, "the runner's own step was laid out"
    assert torch.equal(world.captured.positions, torch.arange(19))
    for _, tokens, (compiled, size) in world.contexts:
        fitting = [each for each in (4, 8, 16) if each >= len(tokens)]
        assert size == (fitting[0] if compiled and fitting else 0)


def test_a_model_that_runs_eagerly_runs_by_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.capture(4, 8, 16, 64)
    world.run_compiled(False)
    check(world, "fixed")
    assert {execution for _, _, execution in world.contexts} == {EAGER}


@pytest.mark.parametrize("name", RECIPES)
def test_norms_that_write_over_their_input_or_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    world.in_place = False
    check(world, name)


@pytest.mark.parametrize("name", RECIPES)
def test_a_host_that_does_not_know_what_was_chosen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a GPU, which computes behind the host."""
    monkeypatch.setattr(tokens_module, "host_reads", lambda device: False)
    check(World(monkeypatch), name)


@pytest.mark.parametrize("windows", [(0,) * LAYERS, (5, 5, 0, 5), (5, 0, 5, 0)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_the_work_that_is_reported_is_done(
    name: str, windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token counts at a layer if its keys and values are written there."""
    world = World(monkeypatch, windows=windows)
    plans = plans_of(RECIPES[name])
    _, active = carried_out(world, plans)
    promised = 0
    for plan, found in zip(plans, active, strict=True):
        always = int(plan.recipe.always.sum())
        promised += plan.layer_tokens(world.layers.model, len(found) - always)
    assert world.layer_tokens == promised
