# SPDX-License-Identifier: Apache-2.0
"""The estimate without an engine: what caches know, and what is left to compute."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segreuse_tools.estimate import gain
from segreuse_tools.estimate.block_cache import BlockCache, BlockPool, Sent
from segreuse_tools.estimate.component_cache import ComponentCache, Lru
from segreuse_tools.estimate.cost_model import CostModel, Spread, measured
from segreuse_tools.estimate.gain import PREFIX, GainSetting, Simulation, SizeRow
from segreuse_tools.estimate.prompts import PromptTokens, Router
from segreuse_tools.estimate.traces.request import Kind, PromptPart, tokens_of
from segreuse_tools.estimate.work_left import PolicyWork
from segreuse_tools.model_folder import InputError
from segreuse_tools.routing import DATA_PARALLEL_HEADER, data_parallel_headers
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import ModelLayers, Pieces
from vllm_segreuse.policies import POLICIES
from vllm_segreuse.scheduling.methods import Methods
from vllm_segreuse.scheduling.plan_maker import least_work

SYSTEM = PromptPart(1000, 48, Kind.SYSTEM)


def passages(*ids: int, tokens: int = 200) -> tuple[PromptPart, ...]:
    return tuple(PromptPart(id, tokens, Kind.PASSAGE) for id in ids)


def question(number: int) -> PromptPart:
    return PromptPart(2000 + number, 30, Kind.QUESTION)


def prompt(*parts: PromptPart, session: str | None = None, answer: int = 0) -> PromptTokens:
    documents = [str(it.id) for it in parts if it.kind is Kind.PASSAGE]
    return PromptTokens(tokens_of(parts), answer, session, documents, parts=parts)


def setting(*cache_tokens: int | None, **others: Any) -> GainSetting:
    usual: dict[str, Any] = {
        "block_size": 16,
        "policies": ("shift", "focus"),
        "layers": 32,
        "engines": 1,
        "router": "session",
        "tier_tokens": 0,
        "max_depth": 4,
        "options": PolicyOptions(),
    }
    return GainSetting(cache_tokens=cache_tokens, **(usual | others))


def simulated(prompts: list[PromptTokens], *sizes: int | None, **others: Any) -> list[SizeRow]:
    simulation = Simulation(setting(*sizes, **others))
    for each in prompts:
        simulation.run(each)
    return [*simulation.rows()]


def shuffled(count: int, of: int = 30, seed: int = 0) -> list[PromptTokens]:
    """Prompts of four passages in any order."""
    rng = random.Random(seed)
    return [
        prompt(SYSTEM, *passages(*rng.sample(range(of), 4)), question(number), session=str(number))
        for number in range(count)
    ]


# Components.


def test_what_was_used_last_longest_ago_goes() -> None:
    cache = Lru(100)
    cache.use([("a", 40), ("b", 40)])
    cache.use([("a", 40), ("c", 40)])
    assert [key in cache for key in "abc"] == [True, False, True]
    assert cache.used == 80


@pytest.mark.parametrize(("capacity", "held"), [(80, [True, True]), (79, [False, True])])
def test_a_cache_may_be_full_to_its_last_token(capacity: int, held: list[bool]) -> None:
    cache = Lru(capacity)
    cache.use([("a", 40), ("b", 40)])
    assert [key in cache for key in "ab"] == held


def test_a_component_is_known_at_any_position_and_a_prefix_only_at_its_own() -> None:
    cache = ComponentCache(10_000)
    a, b = passages(1, 2)
    assert cache.run((SYSTEM, a, b))[:2] == (0, 0)
    prefix, reordered, known = cache.run((SYSTEM, b, a, question(1)))
    assert prefix == SYSTEM.tokens
    assert reordered == SYSTEM.tokens + 400, "in the order of the first prompt it is its beginning"
    assert known == [True, True, True, False]


def test_reordering_finds_nothing_behind_text_that_varies() -> None:
    cache = ComponentCache(10_000)
    for number in range(3):
        varying = PromptPart(500 + number, 20, Kind.SYSTEM)
        prefix, reordered, _ = cache.run((SYSTEM, varying, *passages(1, 2)))
    assert prefix == reordered == SYSTEM.tokens


# Blocks.


def test_blocks_are_taken_in_the_order_in_which_they_became_free() -> None:
    pool = BlockPool(4)
    assert pool.take(4).tolist() == [0, 1, 2, 3]
    pool.name([0, 1, 2, 3], [10, 11, 12, 13])
    pool.free([3, 2])
    pool.free([1, 0])
    assert not pool.has_evicted
    pool.hold([2])
    pool.free([2])
    assert pool.find([12, 13, 10]) == [2, 3, 0]
    assert pool.take(2).tolist() == [3, 1]
    assert pool.has_evicted
    assert pool.find([12, 11]) == [2]
    pool.free_nameless([3])
    pool.free([1])
    assert pool.take(2).tolist() == [3, 0], "what nobody can find is taken first"


def test_what_is_queued_is_bounded() -> None:
    pool = BlockPool(8)
    blocks = pool.take(8)
    pool.free(blocks)
    for _ in range(5000):
        pool.hold([2, 3])
        pool.free([3, 2])
    assert pool.take(8).tolist() == [0, 1, 4, 5, 6, 7, 3, 2]
    assert len(pool._freed) < 2000


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_name_goes_with_the_block_that_has_it(order: tuple[int, int]) -> None:
    pool = BlockPool(4)
    pool.take(4)
    pool.name([0, 2], [10, 12])
    pool.name([1, 3], [10, 12])
    assert pool.find([10]) == [0], "the first one keeps it"
    pool.free([3])
    assert pool.take(1).tolist() == [3]
    assert pool.find([12]) == [2], "the other block of that name has gone"
    pool.free([*order])
    assert pool.take(2).tolist() == [*order]
    assert pool.find([10]) == []


def cached(num_blocks: int, policies: tuple[str, ...] = ("shift",)) -> BlockCache:
    return BlockCache(num_blocks, 16, PolicyWork(policies, 16, 32, PolicyOptions()), max_depth=4)


@pytest.mark.parametrize("options", [{}, {"recompute_ratio": 0.5}, {"recompute_ratio": 1.0}])
def test_policies_that_are_compared_leave_what_each_leaves_alone(options: Any) -> None:
    names = tuple(name for name in POLICIES if name != "exact")
    chosen = PolicyOptions(**options)
    work, layers = PolicyWork(names, 16, 32, chosen), ModelLayers.of_full_attention(32)
    methods = Methods(16, layers, ContentFinder(SegmentIndex(1, 16), 0))
    for in_context in ([0, 0, 0], [1, 1, 0], [0, 1, 0], [1, 1, 1]):
        pieces = Pieces.from_table(
            [(0, 96, 3, 0, 0), (96, 80, 7, 0, 400), (300, 160, 9, 4, 20)], begins=True
        )
        pieces = replace(pieces, in_context=np.array(in_context, np.bool_))
        _, left = work.plans(pieces, 0, 499, 500)
        for name in names:
            method = methods.method(chosen.model_copy(update={"policy": name}), None, is_text=True)
            kept, recipe = least_work(method.make_recipe, method.work, pieces, 0, 499)
            if recipe is None:
                assert left[name] == (500, 0, 0)
                continue
            counts = recipe.counts(recipe.top_k)
            assert left[name].reused == kept.num_tokens
            assert left[name].computed == recipe.program.cost(counts, layers) / 32 + 1


def sent(*parts: PromptPart, answer: int = 0, namespace: int | None = 0) -> Sent:
    return Sent.of(tokens_of(parts), 16, answer, namespace)


def test_a_segment_is_found_at_another_offset_to_its_last_token() -> None:
    cache = cached(1000)
    a, b = passages(1, 2, tokens=205)
    cache.run(sent(SYSTEM, a, b, question(1)))
    found = cache.run(sent(PromptPart(9, 21), b, a, question(2)))
    assert found.prefix_tokens == 0
    # Its blocks begin and end in other text; what stands in them is found token by token.
    assert found.segment_tokens == 410
    assert found.left["shift"].reused == 410
    assert found.left["shift"].computed == 21 + 30


def test_a_prefix_is_found_by_whole_blocks_and_never_the_last_token() -> None:
    cache = cached(1000)
    whole = sent(*passages(1), PromptPart(7, 8))  # 208 tokens: thirteen blocks
    cache.run(whole)
    assert cache.run(whole).prefix_tokens == 12 * 16
    assert cache.run(sent(*passages(1), PromptPart(8, 300))).prefix_tokens == 12 * 16


def test_nothing_is_found_of_prompts_with_another_salt() -> None:
    ordered = (SYSTEM, *passages(1, 2), question(0)), (SYSTEM, *passages(2, 1), question(1))
    first, other = (prompt(*parts) for parts in ordered)
    shares = []
    for salt, namespace in (("", 0), ("a", 1)):
        salted = other._replace(salt=salt, namespace=namespace)
        (row,) = simulated([first, salted, salted], 10_000, policies=("shift",))
        shares.append((row.prefix_share, row.any_position_share))
    (_, whole), (prefix, anywhere) = shares
    once = 29 * 16 / (3 * 478)  # whole blocks of the second prompt, as it comes again
    assert (prefix, anywhere) == pytest.approx((once, once))
    assert whole > 1.5 * anywhere


def test_short_matches_are_not_reused() -> None:
    cache = cached(1000)
    cache.run(sent(*passages(1, tokens=120), question(1)))
    found = cache.run(sent(PromptPart(9, 21), *passages(1, tokens=120), question(2)))
    assert (found.segment_tokens, found.left["shift"].computed) == (0, 171)


@pytest.mark.parametrize(("tokens", "found"), [(127, 0), (128, 128), (129, 129)])
def test_a_match_as_long_as_is_asked_for_is_reused(tokens: int, found: int) -> None:
    cache = cached(1000)
    cache.run(sent(*passages(1, tokens=tokens), question(1)))
    again = sent(PromptPart(9, 21), *passages(1, tokens=tokens), question(2))
    assert cache.run(again)[:2] == (0, found)


@pytest.mark.parametrize(("behind", "reused"), [(0, 0), (1, 128)])
def test_the_last_token_is_no_part_of_a_match(behind: int, reused: int) -> None:
    cache = cached(1000)
    cache.run(sent(*passages(1, tokens=128), question(1)))
    other = [PromptPart(7, behind)] if behind else []
    found = cache.run(sent(PromptPart(9, 16), *passages(1, tokens=128), *other))
    assert found.left["shift"].reused == reused


@pytest.mark.parametrize(("blocks", "is_copied"), [(27, True), (26, False)])
def test_donors_stay_while_they_are_copied(blocks: int, is_copied: bool) -> None:
    """Twelve blocks with the passage, and fifteen for the prompt that it is copied to."""
    cache = cached(blocks)
    cache.run(sent(*passages(1)))
    found = cache.run(sent(PromptPart(90, 25), *passages(1)))
    assert (found.segment_tokens > 0) is is_copied
    assert found.fits
    assert found.left["shift"].computed == (33 if is_copied else 225)


@pytest.mark.parametrize(("answer", "fits"), [(8, True), (9, False)])
def test_a_prompt_and_its_answer_may_fill_the_cache(answer: int, fits: bool) -> None:
    assert cached(13).run(sent(*passages(1), answer=answer)).fits is fits


def test_copied_blocks_take_room_and_do_not_donate() -> None:
    cache = cached(40)
    a = passages(1)
    cache.run(sent(*a, question(0)))
    assert cache.run(sent(PromptPart(90, 25), *a)).segment_tokens == 199
    for number in range(20):
        # The donor stays as long as it is used, although others take its room.
        cache.run(sent(PromptPart(100 + number, 41)))
        assert cache.run(sent(PromptPart(200 + number, 25), *a)).segment_tokens == 199
    for number in range(20):
        cache.run(sent(PromptPart(300 + number, 41)))
    assert cache.run(sent(PromptPart(91, 25), *a)).segment_tokens == 0


def test_a_prompt_without_a_namespace_finds_prefixes_only() -> None:
    cache = cached(1000)
    cache.run(sent(SYSTEM, *passages(1, 2)))
    alone = sent(SYSTEM, *passages(2, 1), namespace=None)
    assert cache.run(alone)[:2] == (48, 0)
    other = sent(SYSTEM, PromptPart(7, 40), *passages(1, 2), namespace=1)
    assert cache.run(other)[:2] == (48, 0)


def test_a_prompt_that_is_larger_than_the_cache_is_said() -> None:
    cache = cached(10)
    found = cache.run(sent(*passages(1)))
    assert (found.fits, found.left["shift"].computed) == (False, 200)
    assert cache.run(sent(question(1))).fits


def test_answers_take_room() -> None:
    cache = cached(30)
    cache.run(sent(*passages(1)))
    cache.run(sent(question(1), answer=290))
    assert cache.run(sent(*passages(1))).prefix_tokens < 192


# All of it.


def test_reuse_at_any_position_knows_what_prefix_caching_does_not() -> None:
    (row,) = simulated(shuffled(80), None)
    assert row.prefix_share < 0.25
    assert row.any_position_share > 0.75
    assert row.whole_any_position_share == pytest.approx(row.any_position_share, abs=0.03)
    work = {it.policy: it.computed_share for it in row.policies}
    assert [*work] == [PREFIX, "shift", "focus"]
    assert work[PREFIX] == pytest.approx(1 - row.prefix_share)
    assert work["shift"] == pytest.approx(1 - row.any_position_share, abs=0.001)
    assert work["shift"] < work["focus"] < work[PREFIX]
    focus = row.policies[2]
    assert 0 < focus.recomputed_share < focus.reused_share


def test_a_larger_cache_knows_more() -> None:
    small, large, unlimited = simulated(shuffled(150), 3_000, 10_000, None)
    shares = [it.any_position_share for it in (small, large, unlimited)]
    assert shares[0] + 0.1 < shares[1]
    assert shares[1] + 0.1 < shares[2]
    whole = [it.whole_any_position_share for it in (small, large, unlimited)]
    assert all(
        bound is not None and bound + 0.01 > it for bound, it in zip(whole, shares, strict=True)
    )
    assert all(row.prefix_share < 0.25 for row in (small, large, unlimited))
    assert not unlimited.is_capped


def test_the_tier_knows_what_a_cache_of_both_sizes_knows() -> None:
    prompts = shuffled(150)
    small, large = simulated(prompts, 3_000, 10_000)
    tiered, _ = simulated(prompts, 3_000, None, tier_tokens=7_000)
    assert tiered.any_position_share == small.any_position_share
    assert tiered.tier_any_position_share == pytest.approx(
        large.any_position_share - small.any_position_share
    )
    assert small.tier_any_position_share is None


def test_components_lose_sixteen_tokens_each_of_what_is_left() -> None:
    a, b = passages(1, 2)
    (row,) = simulated([prompt(SYSTEM, a, b), prompt(SYSTEM, b, a, question(1))], None)
    total = 448 + 478
    assert row.whole_prefix_share == pytest.approx(48 / total)
    assert row.whole_any_position_share == pytest.approx(448 / total)
    # The system prompt is a prefix; of both passages and the question this is computed.
    assert row.whole_computed_share == pytest.approx((448 + 16 + 16 + 30) / total)
    (row,) = simulated([prompt(SYSTEM, a, b)] * 2, None)
    assert row.whole_prefix_share == row.whole_any_position_share == 0.5
    assert row.whole_computed_share == pytest.approx((448 + 1) / 896), "but the last token"


def test_text_has_no_components() -> None:
    text = prompt(SYSTEM, *passages(1, 2))._replace(parts=None)
    (row,) = simulated([text, text], None)
    assert row.whole_prefix_share is row.whole_computed_share is None
    assert row.prefix_share == pytest.approx(432 / 896)


@pytest.mark.parametrize(("limit", "is_capped"), [(464, True), (480, False)])
def test_a_cache_without_a_limit_that_was_full_is_said(
    limit: int, is_capped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gain, "UNLIMITED_TOKENS", limit)
    given = [prompt(*passages(number, tokens=240)) for number in (1, 2)]
    unlimited, limited = simulated(given, None, 464)
    assert (unlimited.is_capped, limited.is_capped) == (is_capped, False)


def test_requests_that_do_not_fit_are_counted() -> None:
    given = [prompt(question(1)), prompt(SYSTEM), prompt(question(2))]
    (row,) = simulated(given, 32)
    assert row.too_long == 1
    (row,) = simulated(given, 16, block_size=32)
    assert row.too_long == 1, "one block is the least"


def test_the_prefix_of_reuse_at_any_position_is_said_apart() -> None:
    a, b = passages(1, 2)
    (row,) = simulated([prompt(SYSTEM, a, b), prompt(SYSTEM, b, a, question(1))], None)
    total = 448 + 478
    assert row.prefix_share == row.any_position_prefix_share == pytest.approx(48 / total)
    assert row.any_position_share == pytest.approx(448 / total)
    assert row.policies[1].reused_share == pytest.approx(400 / total)
    assert row.policies[1].recomputed_share == 0


def test_a_router_by_documents_finds_more_than_one_by_session() -> None:
    rng = random.Random(1)
    prompts = []
    for number in range(300):
        topic = 5 * rng.randrange(12)
        ids = rng.sample(range(topic, topic + 5), 4)
        prompts.append(prompt(SYSTEM, *passages(*ids), question(number), session=str(number)))
    (by_session,) = simulated(prompts, 8_000, engines=4)
    (by_documents,) = simulated(prompts, 8_000, engines=4, router="documents")
    assert by_documents.any_position_share > by_session.any_position_share + 0.05


def test_a_router_keeps_sessions_together_and_others_go_round() -> None:
    router = Router(4, "session")
    of_a = {router.choose(prompt(question(number), session="a")) for number in range(9)}
    assert len(of_a) == 1
    assert [router.choose(prompt(question(0))) for _ in range(5)] == [0, 1, 2, 3, 0]
    assert len({router.choose(prompt(question(0), session=str(it))) for it in range(60)}) == 4


def test_a_router_by_documents_is_that_of_clients() -> None:
    router = Router(7, "documents")
    for number in range(50):
        given = prompt(*passages(number, number + 50))
        headers = data_parallel_headers(given.documents, (), 7)
        assert {DATA_PARALLEL_HEADER: str(router.choose(given))} == headers
    assert router.choose(prompt(question(1), session="a")) == 0, "those without go round"
    assert router.choose(prompt(question(1))) == 1


def test_a_conversation_that_only_grows_gains_nothing() -> None:
    prompts = []
    for conversation in range(5):
        parts: list[PromptPart] = [SYSTEM]
        for number in range(12):
            parts.append(PromptPart(10_000 + 100 * conversation + number, 192))
            prompts.append(prompt(*parts, session=str(conversation)))
    (row,) = simulated(prompts, None)
    assert row.prefix_share > 0.75
    assert row.any_position_share - row.prefix_share < 0.02


@pytest.mark.parametrize("is_alone", [True, False])
def test_prompts_of_one_request_are_no_turns_of_each_other(is_alone: bool) -> None:
    simulation = Simulation(setting(None))
    for number in (1, 2):
        asked = prompt(SYSTEM, *passages(1, 2), question(number), session="one")
        simulation.run(asked._replace(is_alone=is_alone))
    assert simulation.sessions.turns.later == int(is_alone)


def test_times_are_those_of_what_is_computed() -> None:
    cost = CostModel(token_s=1e-3, pair_s=1e-6)
    assert cost.seconds(10, 0, 10) == pytest.approx(10e-3 + 55e-6)
    assert cost.seconds(10, 5, 15) == pytest.approx(10e-3 + sum(range(6, 16)) * 1e-6)
    assert CostModel(token_s=1e-3).seconds(10, 5, 15) == pytest.approx(10e-3)
    (row,) = simulated(shuffled(40), None, cost=cost)
    times = {it.policy: it.first_token_s for it in row.policies}
    assert all(time is not None for time in times.values())
    assert times["shift"] < times["focus"] < times[PREFIX]  # type: ignore[operator]
    (row,) = simulated(shuffled(5), None)
    assert row.policies[0].first_token_s is None


def test_quantiles_are_within_a_hundredth_whatever_was_added() -> None:
    spread = Spread()
    values = np.random.default_rng(0).lognormal(3, 2, 20_000)
    for value in values:
        spread.add(float(value))
    for share in (0.1, 0.5, 0.9):
        assert spread.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.011)
    assert len(spread._bins) < 2500
    spread = Spread()
    assert spread.quantile(0.5) == 0
    spread.add(0)
    assert spread.quantile(0.9) == 0


@pytest.mark.parametrize("value", [1e-6, 0.03, 1.0, 1.01, 17.3, 5e4])
def test_a_quantile_of_one_value_is_that_value(value: float) -> None:
    spread = Spread()
    spread.add(value)
    assert spread.quantile(0.5) == pytest.approx(value, rel=0.005)


def test_a_quantile_is_the_value_that_such_a_share_is_not_above() -> None:
    spread = Spread()
    for value in (0, 1, 1, 50):
        spread.add(value)
    shares = [spread.quantile(share) for share in (0.25, 0.26, 0.75, 0.76, 1)]
    assert shares == pytest.approx([0, 1, 1, 50, 50], rel=0.005)


def test_a_measurement_is_of_full_prefills_of_the_shape_with_most_lengths(tmp_path: Path) -> None:
    def row(tokens: int, ms: float, **others: Any) -> dict[str, Any]:
        return {"shape": "a", "mode": "full", "prompt_tokens": tokens, "median_ms": ms} | others

    def found(*rows: dict[str, Any]) -> CostModel:
        (file := tmp_path / "speed.json").write_text(json.dumps({"rows": rows}))
        return measured(file)

    both = [row(n, n + n * (n + 1) / 200) for n in (100, 1000)]
    noise = [
        row(50, 9e9, shape="b"),
        row(500, 9e9, mode="reuse"),
        {"shape": "a", "mode": "full", "prompt_tokens": 700},
    ]
    cost = found(*noise, *both)
    assert (cost.token_s, cost.pair_s) == pytest.approx((1e-3, 1e-5))
    policy = [{"policy": "full", "tokens": n, "median_ms": n + n * (n + 1) / 200} for n in (9, 99)]
    cost = found(*policy)
    assert (cost.token_s, cost.pair_s) == pytest.approx((1e-3, 1e-5))
    cost = found(row(100, 250), row(7, 0), row(8, math.inf), row(9, math.nan))
    assert (cost.token_s, cost.pair_s) == pytest.approx((2.5e-3, 0))
    cost = found(row(100, 200), row(200, 300), row(400, 400))
    assert (cost.token_s, cost.pair_s) == pytest.approx((1.5e-3, 0)), "attention takes no less"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{}",
        '{"rows": 1}',
        '{"rows": [{"mode": "full", "prompt_tokens": Infinity, "median_ms": 1}]}',
        '{"rows": [{"mode": "full", "prompt_tokens": 1, "median_ms": 0}]}',
    ],
    ids=["deep", "empty", "no rows", "infinite", "no time"],
)
def test_a_file_that_is_no_measurement_is_said_to_be_none(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "speed.json").write_text(text)
    with pytest.raises(InputError, match="has no times of full prefills"):
        measured(file)
