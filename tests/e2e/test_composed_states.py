# SPDX-License-Identifier: Apache-2.0
"""Layers that hand a state on: segments are moved, and the states behind them are composed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from bench.shapes import STATES_OF_CONVOLUTIONS, STATES_OF_MAMBA2
from segreuse_extras.states.scheduler import SegmentStates
from tests.e2e import states_soak
from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, after_preemption, drain, step, submit
from tests.e2e.test_equality import assert_same
from tests.parts import parts_of

pytestmark = pytest.mark.patches("gdn_attention")

SHAPE = states_soak.SHAPE
"""Some tests run on shapes of other kinds, too (`test_composed_kinds`), and all of them in
processes of their own (`test_qwen3_5_states`, `test_mamba2_states`, `test_short_conv_states`)."""
SHIFT: dict[str, Any] = {"policy": "shift"}
NOISE = states_soak.NOISE
"""Of log-probabilities. Where this model's own forward reads the same prompt in chunks that end
elsewhere, they are off by up to 0.32: vLLM's kernel rounds to bf16 in chunks of 64 tokens."""
SHORT_SOAK = 48
"""Requests; `test_states_soak.py` has more of them, and less room."""
LENGTHS = 800, 780
"""Of documents: each has a whole block in it, wherever it stands."""
BRIEF = -418
"""`World.prompt` up to here ends two tokens behind a document: a short convolution sees no more."""


class World:
    """An engine, and answers of plain vLLM that is gone.

    Args:
        full: to `prompt`, to `again`, and to what a module of tests adds.
        running: the engine.
        soak: of those to requests of the short soak, by number.
    """

    def __init__(
        self, full: list[Answer], running: Engine, soak: dict[int, Answer] | None = None
    ) -> None:
        self.full, self.running, self.soak = full, running, soak or {}
        self.documents, self.first, self.prompt, self.again = texts(running.vocab_size)

    @property
    def feature(self) -> SegmentStates:
        found = parts_of(self.running.scheduler.connector.scheduler_side).feature["states"]
        assert isinstance(found, SegmentStates)
        return found

    @property
    def block_size(self) -> int:
        return int(self.running.pool.group.block_size)

    def read(self) -> None:
        """Documents are read in one prompt, and their maps are noted in another one."""
        self.running.ask(self.first, options=NAMESPACE, max_tokens=1)
        assert self.feature.catalogue.num_ready == 0
        self.running.ask(self.prompt, options=NAMESPACE, max_tokens=1)
        assert self.feature.catalogue.num_ready == 2

    def forget_prefix(self, tokens: int, from_block: int = 0) -> None:
        """vLLM finds nothing of a prompt's prefix from some block on; donors of segments stay."""
        pool = self.running.pool
        request = Request(self.running, self.prompt)
        for number in range(from_block, tokens // self.block_size):
            found = pool.get_cached_block(request.block_hashes[number], [pool.group.index])
            if found is not None:
                pool.evict_blocks({found[0].block_id})
                return


class Request:
    """Hashes of a prompt, as vLLM makes them."""

    def __init__(self, running: Engine, prompt: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request as Real

        hasher = running.llm.llm_engine.engine_core.engine_core.request_block_hasher
        made = Real("hashes", prompt, SamplingParams(), None, block_hasher=hasher)
        self.block_hashes = made.block_hashes


def plain_arguments(shape: str) -> dict[str, Any]:
    """Of plain vLLM."""
    if shape in STATES_OF_MAMBA2:
        # With its prefix cache it reads no longer prompts on CPUs (`compat/mamba_mixer2.py`).
        return {"enable_prefix_caching": False}
    if shape in STATES_OF_CONVOLUTIONS:
        # Its kernel for CPUs turns keys wrongly, plain torch does not (`states/rotary.py`).
        return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    return {}


def texts(vocab_size: int) -> tuple[list[list[int]], list[int], list[int], list[int]]:
    """Two documents, and three prompts around them; the last two begin alike."""
    text = Prompts(vocab_size, seed=3)
    documents = [text.tokens(length) for length in LENGTHS]
    first = text.around(*documents, gaps=(30, 20, 400))
    prompt = text.around(*documents[::-1], gaps=(800, 45, 420))
    again = text.around(*documents, gaps=(91, 13, 75))
    return documents, first, prompt, again


@pytest.fixture(scope="module", params=[SHAPE])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def world(shape: str, request: pytest.FixtureRequest) -> Iterator[World]:
    with engine(shape, segreuse=False, **plain_arguments(shape)) as plain:
        _, _, prompt, again = texts(plain.vocab_size)
        full, alone = plain.ask(prompt, again, prompt[:BRIEF]), {}
        if hasattr(request.module, test_a_short_soak.__name__):
            asked = states_soak.requests(plain.vocab_size, SHORT_SOAK)
            alone = states_soak.answers(plain, asked, 8)
    with engine(shape, segreuse=SHIFT) as running:
        yield World(full, running, alone)
        check(running)


def check(running: Engine) -> None:
    """Nothing is held, and both halves know of the same maps."""
    running.check_idle()
    feature = parts_of(running.scheduler.connector.scheduler_side).feature["states"]
    # What was dropped since the last step has not been told yet.
    told = {it.number for it in feature.catalogue} | {*feature._step.dropped}
    assert {*maps_of(running)} <= told


def maps_of(running: Engine) -> dict[int, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_side.backlog.prefill.captures.maps


@pytest.fixture(autouse=True)
def _forgotten(world: World) -> Iterator[None]:
    world.running.reset()
    yield
    check(world.running)


@pytest.mark.shows("states")
def test_segments_where_they_were_read_answer_as_plain_vllm(world: World) -> None:
    """Nothing is approximate then: what is composed is what sequential computation leaves."""
    world.read()
    world.forget_prefix(len(world.prompt))
    [found] = world.running.ask(world.prompt, options=NAMESPACE)
    assert found.report["prefix_tokens"] == 0
    assert found.report["reused_tokens"] == sum(LENGTHS)
    assert_same(found, world.full[0], NOISE)
    assert found.report["computed_share"] < 0.5


@pytest.mark.parametrize("composes", [True, False])
def test_without_composing_it_would_answer_otherwise(
    composes: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above notices what it is about; directly behind a document, any kind of state
    shows."""
    from segreuse_extras.states.layers import StateLayers

    world.read()
    world.forget_prefix(len(world.prompt))
    if not composes:
        monkeypatch.setattr(StateLayers, "compose", lambda *_: None)
    [found] = world.running.ask(world.prompt[:BRIEF], options=NAMESPACE)
    assert found.report["reused_tokens"] == sum(LENGTHS)
    with nullcontext() if composes else pytest.raises(AssertionError):
        assert_same(found, world.full[2], NOISE)


def test_a_plan_goes_on_from_the_state_of_the_prefix_hit(world: World) -> None:
    running, size = world.running, world.block_size
    world.read()
    running.ask(world.prompt[: size + 3], options=NAMESPACE, max_tokens=1)
    world.forget_prefix(len(world.prompt), from_block=1)
    [found] = running.ask(world.prompt, options=NAMESPACE)
    assert found.report["prefix_tokens"] == size
    assert found.report["reused_tokens"] == sum(LENGTHS)
    assert_same(found, world.full[0], NOISE)


def test_what_is_approximate_is_no_prefix(world: World) -> None:
    """Neither KV nor states behind a plan are found by a request that reuses nothing."""
    running = world.running
    world.read()
    [found] = running.ask(world.again, options=NAMESPACE)
    assert found.report["reused_tokens"] == sum(LENGTHS)
    [plain] = running.ask(world.again)
    assert plain.cached_tokens == 0
    assert_same(plain, world.full[1], NOISE)
    [repeated] = running.ask(world.again)
    assert repeated.cached_tokens >= world.block_size
    assert_same(repeated, world.full[1], NOISE)


def test_single_tokens_are_computed_by_themselves(world: World) -> None:
    """Between two segments, and as a prompt."""
    running, text = world.running, Prompts(world.running.vocab_size, seed=6)
    world.read()
    prompt = text.around(*world.documents, gaps=(91, 1, 75))
    [found] = running.ask(prompt, options=NAMESPACE)
    assert found.report["reused_tokens"] == sum(LENGTHS)
    [alone] = running.ask(text.tokens(1))
    assert len(alone.token_ids) == 4


def test_maps_are_noted_over_several_steps(world: World) -> None:
    """vLLM ends a step at the last whole block of a prompt."""
    running, text = world.running, Prompts(world.running.vocab_size, seed=7)
    document = text.tokens(790)
    running.ask(text.around(document, gaps=(400, 400)), options=NAMESPACE, max_tokens=1)
    submit(running, "steps", text.around(document, gaps=(300, 20)), NAMESPACE)
    step(running)
    assert len(world.feature.catalogue) == 1
    assert world.feature.catalogue.num_ready == 0
    step(running)
    assert world.feature.catalogue.num_ready == 1
    assert len(drain(running)) == 1
    [found] = running.ask(text.around(document), options=NAMESPACE)
    assert found.report["reused_tokens"] == 790


def test_maps_are_noted_in_plans(world: World) -> None:
    """A document is computed behind the composed state of another one."""
    running, text = world.running, Prompts(world.running.vocab_size, seed=8)
    other = text.tokens(790)
    world.read()
    running.ask(text.around(other, gaps=(400, 400)), options=NAMESPACE, max_tokens=1)
    mixed = text.around(world.documents[0], other, world.documents[1], gaps=(9, 10, 11, 12))
    [found] = running.ask(mixed, options=NAMESPACE)
    assert found.report["reused_tokens"] == sum(LENGTHS)
    assert world.feature.catalogue.num_ready == 3
    [found] = running.ask(text.around(other, world.documents[0]), options=NAMESPACE)
    assert found.report["reused_tokens"] == 790 + LENGTHS[0]


def test_an_evicted_map_is_a_segment_that_is_computed(world: World) -> None:
    running, text = world.running, Prompts(world.running.vocab_size, seed=4)
    catalogue, capacity = world.feature.catalogue, world.feature.catalogue.capacity
    catalogue.capacity = 2
    try:
        world.read()
        other = text.tokens(800)
        for _ in range(2):
            running.ask(text.around(other, gaps=(50, 400)), options=NAMESPACE, max_tokens=1)
        assert catalogue.num_ready == len(catalogue) == 2
        [found] = running.ask(world.again, options=NAMESPACE)
        assert found.report["reused_tokens"] == LENGTHS[0], "the one that was read last"
        assert len(maps_of(running)) <= 2
    finally:
        catalogue.capacity = capacity


def test_aborted_requests_leave_nothing_behind(world: World) -> None:
    running, text = world.running, Prompts(world.running.vocab_size, seed=5)
    other = text.tokens(800)
    running.ask(text.around(other, gaps=(50, 400)), options=NAMESPACE, max_tokens=1)
    for steps in range(3):  # its map is being noted
        name = submit(running, f"n{steps}", text.around(other), NAMESPACE, max_tokens=20)
        for _ in range(steps):
            step(running)
        abort(running, name)
        drain(running)
        check(running)
    world.running.reset()
    world.read()
    for steps in range(3):  # it has a plan
        name = submit(running, f"p{steps}", text.around(*world.documents), NAMESPACE, max_tokens=9)
        for _ in range(steps):
            step(running)
        abort(running, name)
        drain(running)
        check(running)


def test_preempted_requests_answer_as_others(world: World) -> None:
    running = world.running
    world.read()
    world.forget_prefix(len(world.prompt))
    for steps in (1, 2):
        found = after_preemption(running, f"r{steps}", world.prompt, NAMESPACE, steps)
        assert found.report["reused_tokens"] >= sum(LENGTHS)
        assert_same(found, world.full[0], NOISE)


def test_other_policies_are_bypassed_by_name(world: World) -> None:
    world.read()
    for policy in ("epic", "prophet", "peaks", "exact"):
        asked = NAMESPACE | {"segreuse_policy": policy}
        [found] = world.running.ask(world.again, options=asked, max_tokens=1)
        assert found.report["bypass_reason"] == "states_need_other_policy"
        assert found.report["reused_tokens"] == 0


def test_a_reset_forgets_maps(world: World) -> None:
    """The model may have other weights."""
    world.read()
    world.running.reset()
    assert world.feature.catalogue.num_ready == 0
    world.read()
    assert len(maps_of(world.running)) == 2


def test_a_short_soak(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps are evicted all the while; nothing stays behind, and what is exact is vLLM's answer."""
    catalogue = world.feature.catalogue
    monkeypatch.setattr(catalogue, "capacity", states_soak.ROOM_FOR_MAPS)
    soak = states_soak.Soak(world.running, reset_every=2)
    soak.run(states_soak.requests(world.running.vocab_size, SHORT_SOAK))
    states_soak.compared(soak.exact, world.soak)
    found = states_soak.figures(soak)
    for what in ("moved", "in_full", "twins", "aborted", "maps_evicted", "repeated", "noted_again"):
        assert found[what], what
