# SPDX-License-Identifier: Apache-2.0
"""The cache of an estimate, what replays are summed to, and the pace of a replay."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from segreuse_tools.estimate import comparison
from segreuse_tools.estimate.comparison import Cache, Row, cache_of
from segreuse_tools.estimate.replay import Pace, Replayed, _Run
from segreuse_tools.estimate.request_log import LogError
from segreuse_tools.model_folder import InputError
from vllm_segreuse.plan import ModelLayers

LAYERS = ModelLayers.of_full_attention(4)


def asked(prompt: int, answer: int = 1, time_s: float | None = None) -> Any:
    return Of(
        where="log, line 7",
        token_ids=[0] * prompt,
        answer_ids=[*range(answer)],
        time_s=time_s,
        extra_args={},
    )


@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [
        ([(15, 1)], 1 + 1 + 2),
        ([(16, 1)], 2 + 1 + 2),
        ([(15, 1), (30, 3)], (1 + 1) + (3 + 1) + 2),
    ],
)
def test_a_cache_that_is_not_given_has_room_for_every_request(
    lengths: list[tuple[int, int]], blocks: int
) -> None:
    found = cache_of(Of(kv_bytes=1 << 20), [asked(*it) for it in lengths], 16)
    gib = blocks * 16 / 1024
    assert found == Cache(blocks, 16, gib, is_given=False, is_capped=False)


@pytest.mark.parametrize(
    ("most", "blocks", "is_capped"),
    [(6, 8, False), (5, 7, True), (3, 5, True), (2, 5, True)],
)
def test_a_cache_that_is_not_given_is_limited_but_to_the_largest_request(
    most: int, blocks: int, is_capped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "MOST_BLOCKS", most)
    found = cache_of(Of(kv_bytes=None), [asked(15), asked(47)], 16)
    assert found == Cache(blocks, 16, None, is_given=False, is_capped=is_capped)


def test_a_cache_of_a_size_has_as_many_whole_blocks() -> None:
    one = [asked(15)]
    assert cache_of(Of(kv_bytes=None), one, 16, 9) == Cache(9, 16, None, True, False)
    assert cache_of(Of(kv_bytes=1 << 20), one, 16, 64) == Cache(64, 16, 1.0, True, False)
    assert cache_of(Of(kv_bytes=1 << 20), one, 16, None, 1.0).num_blocks == 64
    assert cache_of(Of(kv_bytes=1 << 20), one, 16, None, 0.999).num_blocks == 63
    with pytest.raises(InputError, match="cannot be examined here: give --num-blocks"):
        cache_of(Of(kv_bytes=None), one, 16, None, 1.0)


@pytest.mark.parametrize(("blocks", "there"), [(4, None), (3, 2), (1, 0), (0, 0)])
def test_one_block_of_the_cache_is_vllms_own(blocks: int, there: int | None) -> None:
    cache = Cache(blocks, 16, None, True, False)
    if there is None:
        comparison._check_sizes([asked(47)], cache)
        return
    with pytest.raises(LogError) as refused:
        comparison._check_sizes([asked(47)], cache)
    assert str(refused.value) == (
        f"log, line 7 needs 3 KV blocks of 16 tokens, and there are {there}: raise --num-blocks or "
        "--kv-gib"
    )


def test_a_row_is_the_sum_of_all_requests() -> None:
    def report(share: float, reused: int, again: int, why: str | None) -> dict[str, Any]:
        tokens = {"reused_tokens": reused, "recomputed_tokens": again}
        return {"computed_share": share, "bypass_reason": why, **tokens}

    reports = [
        report(0.25, 70, 7, None),
        report(1.0, 0, 0, "b"),
        report(1.0, 0, 0, "a"),
        report(1.0, 0, 0, "a"),
        None,
    ]
    replayed = Replayed([20, 0, 1, 2, 3], reports, 11, 12, 13, True)
    assert comparison._summed("focus", [asked(100)] * 5, replayed) == Row(
        policy="focus",
        prefix_tokens=26,
        reused_tokens=70,
        recomputed_tokens=7,
        computed_tokens=0.25 * 80 + 100 + 99 + 98 + 97,
        reusing_requests=1,
        bypassed={"a": 2, "b": 1},
        is_planned=True,
        evicted_blocks=11,
        preemptions=12,
        most_blocks=13,
    )


# The pace.


def run(pace: Pace, *given: Any) -> _Run:
    return _Run(Of(pool=Of(listen=lambda listener: None)), given, pace, ())


def test_requests_are_one_by_one_unless_they_have_times_or_company() -> None:
    assert Pace(LAYERS, 0).is_one_by_one
    assert not Pace(LAYERS, 0, concurrency=2).is_one_by_one
    assert not Pace(LAYERS, 0, tokens_per_s=9.0).is_one_by_one


def test_as_many_arrive_as_may_run() -> None:
    replaying = run(Pace(LAYERS, 0, concurrency=3), *[asked(9)] * 5)
    arrived = []
    for index in replaying.arriving():
        arrived.append(index)
        replaying.live[str(index)] = Of()
    assert arrived == [0, 1, 2]
    del replaying.live["1"]
    assert next(replaying.arriving()) == 3


def test_requests_with_times_wait_for_these_unless_nothing_runs() -> None:
    times = (5.0, 5.0, 7.0, 7.5)
    replaying = run(Pace(LAYERS, 0, tokens_per_s=1.0), *(asked(9, time_s=it) for it in times))
    assert [*replaying.arriving()] == [0, 1], "the clock goes on to the first"
    replaying.live["0"] = Of()
    assert [*replaying.arriving()] == []
    replaying.clock_s = 7.0
    assert [*replaying.arriving()] == [2]
    replaying.live.clear()
    assert [*replaying.arriving()] == [3]
    assert replaying.clock_s == 7.5


def test_a_step_carries_out_the_oldest_spread_plan_first() -> None:
    replaying = run(Pace(LAYERS, 10))
    replaying.spread = {"a": 15, "b": 4, "c": 3}
    assert replaying.go_on() == ([], 10)
    assert replaying.go_on() == (["a", "b"], 10)
    assert replaying.spread == {"c": 2}
    assert replaying.go_on() == (["c"], 2)
    assert replaying.go_on() == ([], 0)


@pytest.mark.parametrize(
    ("computed", "generated", "alone", "company"),
    [(8, 0, [], []), (9, 0, [0, 1, 2], [0]), (10, 1, [1, 2], [1]), (12, 3, [3], [3])],
)
def test_an_answer_alone_is_generated_at_once_but_for_its_last_token(
    computed: int, generated: int, alone: list[int], company: list[int]
) -> None:
    for concurrency, expected in ((1, alone), (2, company)):
        replaying = run(Pace(LAYERS, 0, concurrency), asked(9, answer=4))
        tokens = {"num_tokens": 9 + generated, "num_output_tokens": generated}
        replaying.live["0"] = Of(num_computed_tokens=computed, **tokens)
        assert replaying._next_tokens("0") == expected
