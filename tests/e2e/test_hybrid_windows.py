# SPDX-License-Identifier: Apache-2.0
"""Layers with a window keep blocks of their window only: vLLM's hybrid KV cache manager is on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.integrity import check_integrity
from segreuse_tools.doctor.windowed_kv import held_blocks
from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.stepping import abort, drain, step, submit
from tests.e2e.test_equality import assert_same, check_every_way, check_partial, prompts_for

pytestmark = pytest.mark.patches("single_type_kv_cache_manager")

HYBRID: dict[str, Any] = {"disable_hybrid_kv_cache_manager": False}
NOISE = 2e-3  # of float32
LIMITS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024}
POLICIES = {
    "shift": {"segreuse_policy": "shift"},
    "epic": {"segreuse_policy": "epic"},
    "sparsex": {"segreuse_policy": "sparsex"},
    "cacheblend": {"segreuse_policy": "cacheblend"},
    "prophet": {"segreuse_policy": "prophet"},
    "focus": {"segreuse_policy": "focus"},
}
COUNTED = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "bypass_reason")


def check(running: Engine) -> None:
    """Nothing is held, and what is known of blocks in several groups agrees."""
    running.check_idle()
    check_integrity(running.pool.siblings)
    assert not running.pool.pinned
    indexed = [block for block in range(running.pool.num_gpu_blocks) if block in running.index]
    assert running.pool.are_whole(indexed).all(), "a donor has lost blocks of a window"


def by_policy(running: Engine) -> dict[str, list[Answer]]:
    """Answers to the same prompts, made of the same documents."""
    return {policy: answers_by(running, policy) for policy in POLICIES}


def answers_by(running: Engine, policy: str) -> list[Answer]:
    documents, prompts = prompts_for(running.vocab_size)
    running.reset()
    running.ask(*documents, options=NAMESPACE, max_tokens=1)
    asked = NAMESPACE | POLICIES[policy] | {"segreuse_min_reused_tokens": 16}
    return running.ask(*prompts, options=asked)


class World:
    """Engines of one shape, one after the other: what those that are gone have answered, and the
    last one, which has the hybrid manager.

    Args:
        full: answers of plain vLLM.
        moved: by policy, where all blocks are kept.
        held: see `held_by_a_long_request`, there.
        running: the last one.
    """

    def __init__(
        self, full: list[Answer], moved: dict[str, list[Answer]], held: int, running: Engine
    ) -> None:
        self.full, self.moved, self.held, self.running = full, moved, held, running


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss", "cohere2"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Layers in two groups of two (Gemma 3, gpt-oss), and in four groups of one."""
    shape = request.param
    with engine(shape, segreuse=False, **LIMITS) as plain:
        full = plain.ask(*prompts_for(plain.vocab_size)[1])
    with engine(shape, **LIMITS) as keeping:
        assert len(groups_of(keeping)) == 1, "the default"
        moved, held = by_policy(keeping), held_by_a_long_request(keeping)
    with engine(shape, **LIMITS, **HYBRID) as running:
        assert len(groups_of(running)) == (4 if shape == "cohere2" else 2)
        yield World(full, moved, held, running)
        check(running)


def groups_of(running: Engine) -> list[Any]:
    return running.scheduler.kv_cache_config.kv_cache_groups


def held_by_a_long_request(running: Engine) -> int:
    """Blocks of one layer that a request of 900 tokens holds while it generates."""
    running.reset()
    tokens = Prompts(running.vocab_size, seed=9).tokens(900)
    submit(running, "long", tokens, NAMESPACE, max_tokens=3, ignore_eos=True)
    step(running)
    step(running)
    held = running.pool.num_gpu_blocks - 1 - running.pool.get_num_free_blocks()
    drain(running)
    return held * max(len(group.layer_names) for group in groups_of(running))


@pytest.fixture(autouse=True)
def _forgotten(world: World) -> Iterator[None]:
    world.running.reset()
    yield
    check(world.running)


def test_recomputing_everything_equals_plain_vllm(world: World) -> None:
    documents, prompts = prompts_for(world.running.vocab_size)
    check_every_way(world.running, documents, prompts, world.full, NOISE)
    check_partial(world.running, documents, prompts)


@pytest.mark.parametrize("policy", POLICIES)
def test_moved_text_answers_as_where_all_blocks_are_kept(world: World, policy: str) -> None:
    """KV of windowed layers is moved, and computed, as that of the others."""
    found = answers_by(world.running, policy)
    for ours, kept in zip(found, world.moved[policy], strict=True):
        shown = {name: ours.report[name] for name in COUNTED}
        assert shown == {name: kept.report[name] for name in shown}
        assert ours.report["reused_tokens"] > 200
        assert_same(ours, kept, NOISE)


def test_exact_blocks_are_copied_in_all_layers(world: World) -> None:
    """Behind a hole vLLM's own forward goes on with them; it attends to windows there, too."""
    running, prompt = world.running, prompts_for(world.running.vocab_size)[1][0]
    running.ask(prompt, options=NAMESPACE, max_tokens=1)
    indexed = [block for block in range(running.pool.num_gpu_blocks) if block in running.index]
    running.pool.evict_blocks({*indexed[2:5]})
    [found] = running.ask(prompt, options=NAMESPACE | {"segreuse_policy": "exact"})
    assert found.report["exact_tokens"] > 200
    assert_same(found, world.full[0], NOISE)


def test_a_long_request_holds_windows_only(world: World) -> None:
    """As the doctor counts it."""
    blocks = -(-901 // BLOCK_SIZE)
    assert world.held == 4 * blocks
    specs = [group.kv_cache_spec for group in groups_of(world.running)]
    layers = 4 // len(specs)
    expected = layers * sum(held_blocks(spec, 900) for spec in specs)
    assert held_by_a_long_request(world.running) == expected
    assert expected < 0.65 * world.held


def test_a_prefix_hit_stays_exact(world: World) -> None:
    """A later prompt without extra keys finds nothing that was moved."""
    running = world.running
    documents, prompts = prompts_for(running.vocab_size)
    running.ask(*documents, options=NAMESPACE, max_tokens=1)
    running.ask(*prompts, options=NAMESPACE | POLICIES["shift"])
    for found, expected in zip(running.ask(*prompts), world.full, strict=True):
        assert_same(found, expected, NOISE)


def test_a_donor_that_lost_a_window_is_no_donor(world: World) -> None:
    """Its blocks in the other layers may outlive those of windowed ones."""
    running, text = world.running, Prompts(world.running.vocab_size, seed=31)
    document = text.tokens(320)
    running.ask(document, options=NAMESPACE, max_tokens=1)
    indexed = [block for block in range(running.pool.num_gpu_blocks) if block in running.index]
    assert len(indexed) == 10
    windowed = running.pool.siblings.all_of(indexed[4:5])
    running.pool.evict_blocks({windowed[-1]})
    assert indexed[4] not in running.index
    [found] = running.ask(text.around(document), options=NAMESPACE | POLICIES["shift"])
    assert 0 < found.report["reused_tokens"] <= 320 - BLOCK_SIZE


def test_aborted_requests_leave_nothing_behind(world: World) -> None:
    running, text = world.running, Prompts(world.running.vocab_size, seed=32)
    document = text.tokens(320)
    running.ask(document, options=NAMESPACE, max_tokens=1)
    for options in (POLICIES["shift"], POLICIES["focus"]):
        for steps in range(3):
            name = submit(
                running, f"{steps}", text.around(document), NAMESPACE | options, max_tokens=20
            )
            for _ in range(steps):
                step(running)
            abort(running, name)
            drain(running)
            check(running)
