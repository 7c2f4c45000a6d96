# SPDX-License-Identifier: Apache-2.0
"""Turns that hold moved text are computed in full while the engine is idle."""

from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from segreuse_extras.healing import scheduler as healing
from tests.parts import parts_of
from tests.test_scheduler import DOCUMENT, OPTIONS, SIZE, World

SHIFT = OPTIONS | {"segreuse_policy": "shift"}
TURN = [7, *DOCUMENT, *range(8, 19)]
"""A new token in front of the document, in whole blocks."""
PART = 4 * SIZE


def world_of(**options: Any) -> World:
    """A document is cached."""
    world = World(min_reused_tokens=4, **{"heal_tokens": PART, "heal_after_s": 0.0} | options)
    world.run(world.add(DOCUMENT, SHIFT))
    return world


def turn(world: World, tokens: list[int], options: Any = SHIFT, **fields: Any) -> Request:
    """A turn that ends."""
    request = world.add(tokens, options, **fields)
    world.run(request)
    end(world, request)
    return request


def end(world: World, request: Request, status: Any = RequestStatus.FINISHED_LENGTH_CAPPED) -> None:
    request.append_output_token_ids([1])
    request.num_computed_tokens = request.num_tokens - 1
    request.status = status
    world.side.finished(request, [])


def next_part(world: World, running: int = 0, waiting: int = 0) -> Request | None:
    return next(iter(world.side.take_requests(running, waiting, False)), None)


def compute(world: World, part: Request) -> None:
    """What vLLM does with a part."""
    full = part.num_tokens // SIZE
    hit = parts_of(world.side).core.pool.resident_blocks(part, 0, full)
    known = [world.pool.blocks[i] for i in hit[: list(hit).index(-1)]]
    world.pool.touch(known)
    blocks = [*known, *world.pool.get_new_blocks(full + 1 - len(known))]
    world.pool.cache_full_blocks(part, blocks, len(known), full, SIZE, 0)
    world.side.take_step(True)
    end(world, part)
    world.pool.free_blocks(reversed(blocks))


def outcomes(world: World) -> dict[str, int]:
    """What became of turns."""
    return dict(world.stats.data.get("healings_total", {}))


def test_an_idle_engine_computes_a_turn_in_full_part_by_part() -> None:
    world = world_of()
    done = turn(world, TURN)
    lengths = []
    while (part := next_part(world)) is not None:
        assert part.prompt_token_ids == TURN[: part.num_prompt_tokens]
        assert part.sampling_params is not None
        assert part.sampling_params.extra_args is None
        lengths.append(part.num_prompt_tokens)
        compute(world, part)
    assert lengths == [PART, 2 * PART, len(TURN)]
    assert (world.pool.resident_blocks(done, 0, len(TURN) // SIZE) >= 0).all()
    assert world.stats.data["healed_tokens_total"] == len(TURN)
    assert outcomes(world) == {"healed": 1}


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (0, 1)])
def test_nothing_is_computed_while_somebody_needs_the_engine(running: int, waiting: int) -> None:
    world = world_of()
    turn(world, TURN)
    assert next_part(world, running, waiting) is None
    assert not [*world.side.take_requests(0, 0, True)], "nor while it is paused"
    assert next_part(world) is not None


class Clock:
    """Seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """That of worlds to come."""
    clock = Clock()
    monkeypatch.setattr(healing, "monotonic", clock)
    return clock


def resting_world() -> World:
    """A turn waits, and the engine heals when it has rested for ten seconds."""
    world = world_of(heal_after_s=10.0)
    turn(world, TURN)
    return world


def test_an_engine_heals_that_nobody_has_needed_for_some_time(clock: Clock) -> None:
    world = resting_world()
    clock.now += 9.9
    assert next_part(world) is None
    assert world.side.has_pending_work, "an engine that nobody wakes would not see the time"
    clock.now += 0.1
    part = next_part(world)
    assert part is not None
    compute(world, part)
    assert next_part(world) is not None, "parts of one rest follow each other"


@pytest.mark.parametrize("how", ["runs", "waits", "has ended", "runs beside a part"])
def test_whoever_needs_the_engine_begins_its_rest_anew(how: str, clock: Clock) -> None:
    world = resting_world()
    clock.now += 10
    if how == "runs beside a part":
        part = next_part(world)
        assert part is not None
        assert next_part(world, running=2) is None
        compute(world, part)
    elif how == "has ended":  # within one step, so that it was never seen to run
        turn(world, [*range(50, 90)], None)
    else:
        assert next_part(world, running=how == "runs", waiting=how == "waits") is None
    clock.now += 9.9
    assert next_part(world) is None
    clock.now += 0.1
    assert next_part(world) is not None


def test_an_own_part_is_no_need(clock: Clock) -> None:
    world = resting_world()
    clock.now += 10
    part = next_part(world)
    assert part is not None
    clock.now += 1
    assert next_part(world, running=1) is None
    compute(world, part)
    assert next_part(world) is not None


def test_an_engine_without_turns_or_paused_need_not_step() -> None:
    world, paused = world_of(), False
    world.side.steps_by(lambda: None, lambda: paused)
    assert not world.side.has_pending_work
    turn(world, TURN)
    assert world.side.has_pending_work
    paused = True
    assert not world.side.has_pending_work
    assert not [*world.side.take_requests(0, 0, True)]
    paused = False
    assert world.side.has_pending_work, "nobody steps between a pause and its end"
    world.side.resetting()
    assert not world.side.has_pending_work


class Alarms:
    """In place of the alarm of worlds to come: when it was set for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set_for: list[float] = []
        monkeypatch.setattr(healing, "Alarm", lambda clock: self)

    def set(self, when_s: float, wake: Any) -> None:
        self.set_for.append(when_s)
        wake()


def test_an_engine_that_can_be_woken_sleeps_until_it_has_rested(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms, woken = Alarms(monkeypatch), list[float]()
    world = resting_world()
    world.side.steps_by(lambda: woken.append(clock.now), lambda: False)
    assert next_part(world) is None
    assert not world.side.has_pending_work
    assert next_part(world, running=1) is None
    assert (alarms.set_for, woken) == ([110.0], [100.0]), "who works needs no alarm"
    clock.now += 10
    assert world.side.has_pending_work
    part = next_part(world)
    assert part is not None
    assert next_part(world, running=1) is None
    compute(world, part)
    assert next_part(world) is not None
    assert alarms.set_for == [110.0], "nor who heals"


def test_an_engine_without_turns_sets_no_alarm(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms = Alarms(monkeypatch)
    world = world_of(heal_after_s=10.0)
    world.side.steps_by(lambda: None, lambda: False)
    assert next_part(world) is None
    assert not alarms.set_for


def test_one_part_at_a_time() -> None:
    world = world_of()
    turn(world, TURN)
    assert next_part(world) is not None
    assert next_part(world) is None


def test_without_the_option_nothing_is_computed() -> None:
    world = world_of(heal_tokens=0)
    turn(world, TURN)
    assert next_part(world) is None


def test_what_is_exact_needs_nothing() -> None:
    world = world_of()
    turn(world, [*range(50, 90)])
    turn(world, TURN, None)
    assert next_part(world) is None


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_who_was_not_answered_does_not_go_on(status: Any) -> None:
    world = world_of()
    request = world.add(TURN, SHIFT)
    world.run(request)
    end(world, request, status)
    assert next_part(world) is None


def test_an_answer_that_ends_at_a_stop_string_goes_on() -> None:
    """vLLM's API server finds it, and aborts the request."""
    world = world_of()
    request = world.add(TURN, SHIFT, sampling={"stop": ["."], "detokenize": True})
    world.run(request)
    end(world, request, RequestStatus.FINISHED_ABORTED)
    assert next_part(world) is not None


def test_a_turn_that_goes_on_is_left_to_the_next() -> None:
    world = world_of()
    turn(world, TURN)
    part = next_part(world)
    assert part is not None
    world.run(world.add([*TURN, 1, 2, 3, 4, 5], SHIFT))
    compute(world, part)
    assert next_part(world) is None
    assert outcomes(world) == {"overtaken": 1}


def test_another_text_another_salt_are_other_conversations() -> None:
    world = world_of()
    turn(world, TURN)
    world.run(world.add([*TURN, 1, 2, 3, 4, 5], SHIFT, cache_salt="other"))
    world.run(world.add([6, *TURN[1:]], SHIFT))
    assert next_part(world) is not None
    assert outcomes(world) == {}


def test_a_reset_forgets_what_waits_and_ends_what_runs() -> None:
    world = world_of()
    turn(world, TURN)
    part = next_part(world)
    assert part is not None
    assert world.side.resetting() == [part.request_id]
    end(world, part, RequestStatus.FINISHED_ABORTED)
    assert next_part(world) is None
    assert outcomes(world) == {"forgotten": 1}


def test_whose_blocks_are_gone_at_once_is_given_up() -> None:
    world = world_of()
    turn(world, TURN)
    part = next_part(world)
    assert part is not None
    end(world, part)  # and nothing was named
    assert next_part(world) is None
    assert outcomes(world) == {"forgotten": 1}


@pytest.mark.parametrize("more", [0, 1])
def test_without_room_for_a_part_and_one_block_more_a_turn_is_given_up(more: int) -> None:
    world = world_of()
    turn(world, TURN)
    world.pool.get_new_blocks(world.pool.get_num_free_blocks() - PART // SIZE - more)
    assert (next_part(world) is not None) is bool(more)
    assert outcomes(world) == ({} if more else {"forgotten": 1})


def test_of_the_room_that_vllm_leaves_free_no_part_takes_any() -> None:
    world = world_of()
    turn(world, TURN)
    parts_of(world.side).core.manager.watermark_blocks = 3
    world.pool.get_new_blocks(world.pool.get_num_free_blocks() - PART // SIZE - 3)
    assert next_part(world) is None


@pytest.mark.parametrize(("most", "length"), [(1, 1), (2 * SIZE - 1, 1), (2 * SIZE, 2)])
def test_a_part_is_as_many_whole_blocks_as_may_be_and_one_at_least(most: int, length: int) -> None:
    world = world_of(heal_tokens=most)
    turn(world, TURN)
    part = next_part(world)
    assert part is not None
    assert part.num_prompt_tokens == length * SIZE


def test_parts_are_requests_of_one_token_that_all_others_go_before() -> None:
    world = world_of()
    world.run(world.add(DOCUMENT, SHIFT, cache_salt="own"))
    of = turn(world, TURN, cache_salt="own")
    for number in (1, 2):
        part = next_part(world)
        assert part is not None
        assert part.request_id == f"segreuse-heal-{number}"
        assert (part.max_tokens, part.priority) == (1, 2**31 - 1)
        assert (part.cache_salt, part.lora_request) == ("own", of.lora_request)
        assert part.block_hashes == of.block_hashes[: len(part.block_hashes)] != []
        params = part.sampling_params
        assert params is not None
        assert (params.temperature, params.ignore_eos, params.detokenize) == (0, True, False)
        compute(world, part)


def test_a_turn_whose_adapter_is_gone_is_forgotten(tmp_path: Path) -> None:
    """The worker would not find it, and the engine would end."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapter = LoRARequest("adapter", 1, str(folder))
    world = world_of(heal_tokens=1000)
    world.run(world.add(DOCUMENT, SHIFT, lora_request=adapter))
    turn(world, TURN, lora_request=adapter)
    part = next_part(world)
    assert part is not None
    assert part.lora_request is adapter
    compute(world, part)
    turn(world, [6, *TURN], lora_request=adapter)
    folder.rmdir()
    assert next_part(world) is None
    assert outcomes(world) == {"healed": 1, "forgotten": 1}


@pytest.mark.parametrize("tokens", [len(TURN) - 1, len(TURN), len(TURN) + SIZE - 1])
def test_a_turn_is_computed_up_to_its_last_whole_block(tokens: int) -> None:
    world = world_of(heal_tokens=1000)
    turn(world, [*TURN, *range(60, 80)][:tokens])
    part = next_part(world)
    assert part is not None
    assert part.num_prompt_tokens == tokens // SIZE * SIZE
    compute(world, part)
    assert next_part(world) is None
    assert world.stats.data["healed_tokens_total"] == part.num_prompt_tokens


def test_the_oldest_are_given_up_where_many_wait() -> None:
    world = world_of()
    for first in range(66):
        turn(world, [1000 + first, *TURN[1:]])
    part = next_part(world)
    assert part is not None
    assert part.prompt_token_ids == [1002, *TURN[1:PART]]
    assert outcomes(world) == {"forgotten": 2}
