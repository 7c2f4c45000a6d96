# SPDX-License-Identifier: Apache-2.0
"""A request's own prefix is restored from records that are exact and its own by vLLM's hash, and
gets exact names once the workers have reported it; through the scheduler's side and vLLM's pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request, RequestStatus

from segreuse_extras.compressed.orders import CopyOrder, ScoreOrder
from tests.parts import parts_of
from tests.test_scheduler import DOCUMENT, LORA, OPTIONS, SIZE
from tests.tier.test_scheduler_side import EXPLAIN, Tiered
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.features.knowledge.frozen import FrozenPart
from vllm_segreuse.plan import FreezeOrder, Pieces, PlanOutcome, ReusePlan, Tier, TierDone

PROMPT = [*DOCUMENT, 9]
BLOCKS = len(DOCUMENT) // SIZE
EXACT = OPTIONS | {"segreuse_policy": "exact"}


class Admitted(NamedTuple):
    """A request that runs."""

    request: Request
    blocks: list[KVCacheBlock]
    plan: ReusePlan | None
    supplied: int | None


class Restoring(Tiered):
    """With requests that run step by step."""

    def admit(self, tokens: list[int], options: Any = OPTIONS, **fields: Any) -> Admitted:
        """A request arrives, and its step leaves."""
        request = self.add(tokens, options, **fields)
        return self.schedule(request)

    def schedule(self, request: Request) -> Admitted:
        """A step with the request leaves, all of whose prompt it computes."""
        hit = 0
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // SIZE]:
            if self.pool.get_cached_block(block_hash, [0]) is None:
                break
            hit += 1
        found = [self.pool.get_cached_block(h, [0])[0] for h in request.block_hashes[:hit]]
        supplied = self.match(request, hit * SIZE)
        full = request.num_tokens // SIZE
        self.pool.touch(found)
        blocks = [*found, *self.pool.get_new_blocks(full + 1 - hit)]
        self.pool.cache_full_blocks(request, blocks, hit, full, SIZE, 0)
        self.side.allocated(request, [block.block_id for block in blocks])
        plans, orders = self.end_step()
        self.report(orders)
        return Admitted(request, blocks, plans[0] if plans else None, supplied)

    def end(self, admitted: Admitted, **status: Any) -> dict[str, Any] | None:
        """The request ends; its blocks are free."""
        admitted.request.status = status.get("status", RequestStatus.FINISHED_ABORTED)
        report = self.side.finished(admitted.request, [b.block_id for b in admitted.blocks])
        self.pool.free_blocks(reversed(admitted.blocks))
        return report

    def reported(self, admitted: Admitted, in_place: bool = True) -> None:
        """The workers report the plan."""
        assert admitted.plan is not None
        assert admitted.plan.restoration is not None
        number, name = admitted.plan.restoration.number, admitted.request.request_id
        outcome = PlanOutcome(0, restoration=number, is_restored=in_place)
        alive = parts_of(self.side).planner.get(name)
        self.side.reported({}, {name: outcome}, {} if alive is None else {name: admitted.request})

    def named(self, request: Request) -> list[int]:
        """Which of a request's blocks are found by their exact names."""
        found = [self.pool.get_cached_block(name, [0]) for name in request.block_hashes]
        return [i for i, block in enumerate(found) if block is not None]


@pytest.fixture
def world() -> Restoring:
    """A document that was evicted, and is in host memory."""
    restoring = Restoring()
    restoring.end(restoring.admit(DOCUMENT))
    restoring.report(restoring.evict_all())
    assert restoring.side.status()["tier"]["host"] == BLOCKS
    return restoring


@pytest.mark.parametrize(("share", "behind"), [(None, 0), (0.1, 20)])
def test_it_is_restored_although_what_is_behind_it_is_not_worth_it(
    world: Restoring, share: float | None, behind: int
) -> None:
    other = [*range(200, 216)]
    world.end(world.admit([1, 2, 3, 4, *other, 5]))
    wanted = EXPLAIN | {"segreuse_policy": "focus", "segreuse_recompute_ratio": share}
    admitted = world.admit([*DOCUMENT, 5, 6, 7, 8, *other, 9], wanted)
    plan = admitted.plan
    assert plan is not None
    assert (plan.begin, plan.num_restored, plan.num_tokens) == (0, len(DOCUMENT), behind)
    assert plan.left_out == (0 if behind else len(other))
    assert admitted.supplied == len(DOCUMENT) + behind
    report = world.end(admitted)
    assert report is not None
    assert report.get("matches", 0) == 1 + bool(behind)
    reasons = [each["reason"] for each in report["explain"] if each["source"] == "new"]
    assert reasons == ["unknown" if behind else "not_worth_it", "last_token"]


@pytest.mark.parametrize("least", [1, 17])
def test_too_little_behind_it_is_found_and_computed(world: Restoring, least: int) -> None:
    other = [*range(200, 216)]
    world.end(world.admit([1, 2, 3, 4, *other, 5]))
    wanted = EXPLAIN | {"segreuse_min_reused_tokens": least}
    report = world.end(world.admit([*DOCUMENT, 5, *other, 9], wanted))
    assert report is not None
    reasons = [each["reason"] for each in report["explain"] if each["source"] == "new"]
    assert reasons[0] == ("not_worth_it" if least > len(other) else "shorter_than_block")


def test_similar_text_behind_it_is_found_and_computed(world: Restoring) -> None:
    """No index of equal text knows of it."""
    request = world.add(
        [*DOCUMENT, *range(200, 216), 9], EXPLAIN | {"segreuse_min_reused_tokens": 17}
    )
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    similar = Matches.of(Pieces.from_table([[36, 8, 1, 0, 90]], is_similar=True))
    finder = ContentFinder(world.index, 0)
    finder.find = lambda *_: similar  # type: ignore[method-assign]
    tracked.method = replace(tracked.method, finder=finder)
    report = world.end(world.schedule(request))
    assert report is not None
    assert [each.get("reason", each["source"]) for each in report["explain"]] == [
        *("segment", "not_worth_it", "last_token")
    ]


def test_who_falls_back_is_told_why_nothing_is_searched_for_behind_it(
    world: Restoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [*range(200, 216)]
    world.end(world.admit([1, 2, 3, 4, *other, 5]))
    monkeypatch.setattr(parts_of(world.side).audits, "falls_back", lambda _: True)
    report = world.end(world.admit([*DOCUMENT, *other, 9], EXPLAIN))
    assert report is not None
    assert [each.get("reason", each["source"]) for each in report["explain"]] == [
        *("segment", "fallback", "last_token")
    ]


def test_it_has_exact_names_once_the_workers_have_reported(world: Restoring) -> None:
    admitted = world.admit(PROMPT)
    plan = admitted.plan
    assert plan is not None
    assert admitted.supplied == len(DOCUMENT)
    assert (plan.begin, plan.start, plan.stop) == (0, len(DOCUMENT), len(DOCUMENT))
    assert plan.restoration is not None
    assert (plan.restoration.pieces.source == Tier.HOST).all()
    assert plan.reports
    assert world.named(admitted.request) == []
    assert not any(block.block_id in world.index for block in admitted.blocks)
    world.reported(admitted)
    assert world.named(admitted.request) == [*range(BLOCKS)]
    assert all(block.block_id in world.index for block in admitted.blocks[:BLOCKS])
    again = world.admit(PROMPT, None)
    assert again.blocks[:BLOCKS] == admitted.blocks[:BLOCKS], "vLLM finds it for anybody"
    report = world.end(admitted)
    assert report is not None
    kinds = ("prefix", "reused", "exact", "tiered", "recomputed", "new")
    assert [report[f"{kind}_tokens"] for kind in kinds] == [0, 32, 32, 32, 0, 1]
    assert report["computed_share"] == round(1 / 33, 4)


def test_what_is_computed_behind_it_waits_for_the_same_report(world: Restoring) -> None:
    admitted = world.admit([*DOCUMENT, *range(500, 500 + 2 * SIZE), 9])
    world.reported(admitted)
    assert world.named(admitted.request) == [*range(BLOCKS + 2)]
    depths = world.index.nodes["depth"][[b.block_id for b in admitted.blocks[: BLOCKS + 2]]]
    assert not depths.any(), "nothing of it is approximate"


@pytest.mark.parametrize("options", [OPTIONS, EXACT], ids=["shift", "exact"])
def test_what_failed_has_no_exact_name_and_nothing_behind_it(
    options: Any, world: Restoring
) -> None:
    admitted = world.admit([*DOCUMENT, *range(500, 500 + SIZE), 9], options)
    world.reported(admitted, in_place=False)
    assert world.named(admitted.request) == []
    request, blocks = admitted.request, admitted.blocks
    request.append_output_token_ids([1, 2, 3, 4])
    full = request.num_tokens // SIZE
    blocks += world.pool.get_new_blocks(1)
    world.pool.cache_full_blocks(request, blocks, full - 1, full, SIZE, 0)
    assert world.named(request) == []
    assert not world.pool._awaited
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    depths = parts_of(world.side).donors.depths(tracked, 0, full)
    assert (depths != 0).all(), "it was computed by the pass, which rounds otherwise"


def test_blocks_that_were_taken_meanwhile_get_no_name(world: Restoring) -> None:
    admitted = world.admit(PROMPT)
    world.end(admitted)
    world.pool.free_blocks(world.pool.get_new_blocks(world.pool.get_num_free_blocks()))
    world.reported(admitted)
    assert world.named(admitted.request) == []
    assert not world.pool._awaited


def test_who_ended_before_the_report_leaves_exact_blocks(world: Restoring) -> None:
    admitted = world.admit(PROMPT)
    world.end(admitted)
    world.reported(admitted)
    assert world.named(admitted.request) == [*range(BLOCKS)]


def test_a_report_on_an_earlier_plan_is_not_taken_for_that_of_another(world: Restoring) -> None:
    first = world.admit(PROMPT)
    world.pool.free_blocks(reversed(first.blocks))  # preempted
    second = world.schedule(first.request)
    assert second.plan is not None
    world.reported(first, in_place=False)
    assert second.plan.is_restored is None
    assert world.named(first.request) == []
    world.reported(second)
    assert world.named(first.request) == [*range(BLOCKS)]
    world.end(second)


def test_a_reset_ends_what_is_awaited(world: Restoring) -> None:
    admitted = world.admit(PROMPT)
    world.pool.free_blocks(reversed(admitted.blocks))
    assert world.pool.reset_prefix_cache()
    assert not world.pool._awaited
    world.reported(admitted)
    assert world.named(admitted.request) == []


def test_blocks_that_a_request_has_lost_are_not_indexed_as_its_own(world: Restoring) -> None:
    first = world.admit(PROMPT)
    world.pool.free_blocks(reversed(first.blocks))  # preempted
    second = world.schedule(first.request)
    lost = {block.block_id for block in first.blocks[:BLOCKS]}
    assert lost.isdisjoint(block.block_id for block in second.blocks)
    world.reported(first)
    assert world.named(first.request) == [*range(BLOCKS)], "they hold what their names say"
    assert not any(block_id in world.index for block_id in lost)


def test_segments_behind_it_are_in_the_same_plan(world: Restoring) -> None:
    later = [*range(700, 732)]
    world.end(world.admit([5, *later, 6]))
    world.report(world.evict_all())
    admitted = world.admit([*DOCUMENT, 8, *later, 9])
    plan = admitted.plan
    assert plan is not None
    assert (plan.begin, plan.start, plan.stop) == (0, 32, 64)
    assert plan.num_restored == 32
    assert plan.num_reused > 20
    assert (plan.copied.source == Tier.HOST).all()
    world.reported(admitted)
    assert world.named(admitted.request) == [*range(BLOCKS)], "and none behind"


def test_few_tokens_of_a_segment_are_no_reason_to_approximate(world: Restoring) -> None:
    options = OPTIONS | {"segreuse_min_reused_tokens": 3 * SIZE}
    later = [*range(700, 700 + 2 * SIZE)]
    world.end(world.admit([*later, 6]))
    admitted = world.admit([*DOCUMENT, 8, *later, 9], options)
    assert admitted.plan is not None
    assert (admitted.plan.stop, len(admitted.plan.pieces)) == (32, 0)


def test_a_hole_ends_it_and_records_behind_are_segments(world: Restoring) -> None:
    tier = parts_of(world.side).tier
    assert tier is not None
    entry = tier.exact_entry
    hole = world.add(PROMPT).block_hashes[3]
    tier.exact_entry = lambda name: -1 if name.startswith(hole) else entry(name)
    admitted = world.admit(PROMPT)
    assert admitted.plan is not None
    assert admitted.plan.num_restored == 3 * SIZE
    assert admitted.plan.num_reused == len(DOCUMENT) - 3 * SIZE
    world.reported(admitted)
    assert world.named(admitted.request) == [0, 1, 2]


def test_the_exact_tier_reads_records_behind_holes(world: Restoring) -> None:
    tier = parts_of(world.side).tier
    assert tier is not None
    entry = tier.exact_entry
    hole = world.add(PROMPT).block_hashes[3]
    tier.exact_entry = lambda name: -1 if name.startswith(hole) else entry(name)
    admitted = world.admit(PROMPT, EXACT)
    plan = admitted.plan
    assert plan is not None
    assert (plan.num_restored, plan.start, plan.stop) == (3 * SIZE, 3 * SIZE, 32)
    assert plan.num_reused == 4 * SIZE
    assert plan.recipe.always.tolist() == [True] * SIZE + [False] * (4 * SIZE)
    world.reported(admitted)
    assert world.named(admitted.request) == [0, 1, 2]


def test_records_that_cannot_be_had_end_it(
    world: Restoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = parts_of(world.side).tier
    assert tier is not None
    hold, request = tier.hold, world.add(PROMPT)
    gone = make_block_hash_with_group_id(request.block_hashes[2], 0)

    def without_third(request_id: str, entries: Any) -> Any:
        rows = hold(request_id, entries)
        rows[entries == tier.exact_entry(gone)] = -1
        return rows

    monkeypatch.setattr(tier, "hold", without_third)
    admitted = world.admit(PROMPT)
    assert admitted.plan is not None
    assert admitted.plan.num_restored == 2 * SIZE
    assert admitted.plan.num_reused == 5 * SIZE, "as segments"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cache_salt": "other"}, "another salt"),
        ({"lora_request": LORA}, "another adapter"),
    ],
)
def test_what_vllms_hash_tells_apart_is_not_restored(
    fields: dict[str, Any], why: str, world: Restoring
) -> None:
    assert world.admit(PROMPT, **fields).supplied == 0, why


def test_other_tokens_in_front_are_another_prefix(world: Restoring) -> None:
    admitted = world.admit([8, *DOCUMENT, 9])
    assert admitted.plan is not None
    assert admitted.plan.num_restored == 0, "found as a segment"


def test_another_namespace_is_given_its_prefix_as_by_vllm(world: Restoring) -> None:
    admitted = world.admit(PROMPT, OPTIONS | {"extra_keys": "others"})
    assert admitted.supplied == len(DOCUMENT)


def test_requests_without_keys_are_vllms_alone(world: Restoring) -> None:
    assert world.admit(PROMPT, None).supplied == 0


@pytest.mark.parametrize("state", [False, "observe"])
def test_switched_off_or_observed_nothing_is_restored(state: Any, world: Restoring) -> None:
    world.side.set_enabled(state)
    admitted = world.admit(PROMPT)
    assert (admitted.supplied, admitted.plan) == (0, None)


def test_approximate_records_are_never_restored() -> None:
    world = Restoring()
    world.end(world.admit([7, *DOCUMENT, 8]))
    approximate = world.admit([6, *DOCUMENT, 8, *range(600, 620)])
    assert approximate.plan is not None
    world.end(approximate)
    world.report(world.evict_all())
    again = world.admit([6, *DOCUMENT, 8, *range(600, 620)])
    assert again.plan is not None
    assert again.plan.num_restored == 0


def test_a_record_of_deeper_provenance_is_not_exact_whatever_its_key(world: Restoring) -> None:
    tier = parts_of(world.side).tier
    assert tier is not None
    for record in tier.catalogue:
        record.about = record.about._replace(depth=1)
    admitted = world.admit(PROMPT)
    assert admitted.plan is None or not admitted.plan.num_restored


def test_a_document_of_a_knowledge_base_is_restored_and_frozen(world: Restoring) -> None:
    order = FreezeOrder("entry", 0, 1, 0)
    admitted = world.admit(PROMPT, OPTIONS | {"segreuse_freeze": order.encode()})
    assert admitted.supplied == len(DOCUMENT)
    world.reported(admitted)
    report = world.end(admitted, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    assert report is not None
    assert report["frozen"]
    assert report.get("exact_tokens", 0) == len(DOCUMENT)
    assert "entry" in world.frozen.warm()


def test_a_document_reuses_no_segments(world: Restoring) -> None:
    order = FreezeOrder("entry", 0, 1, 1)
    options = OPTIONS | {"segreuse_freeze": order.encode()}
    admitted = world.admit([8, *DOCUMENT, 9], options)
    assert (admitted.supplied, admitted.plan) == (0, None)
    report = world.end(admitted)
    assert report is not None
    assert report["bypass_reason"] == "knowledge_base"


def test_a_document_that_failed_to_be_restored_is_not_frozen(world: Restoring) -> None:
    order = FreezeOrder("entry", 0, 1, 0)
    admitted = world.admit(PROMPT, OPTIONS | {"segreuse_freeze": order.encode()})
    world.reported(admitted, in_place=False)
    report = world.end(admitted, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    assert report is not None
    assert not report["frozen"]


def test_rows_are_held_until_the_workers_have_read_them(world: Restoring) -> None:
    request = world.add(PROMPT)
    assert world.match(request, 0) == len(DOCUMENT)
    blocks = world.pool.get_new_blocks(BLOCKS + 1)
    world.side.allocated(request, [block.block_id for block in blocks])
    _, orders = world.end_step()
    assert orders is not None
    assert world.side.status()["tier"]["holds"] == 1
    world.side.finished(request, [])
    assert world.side.status()["tier"]["holds"] == 1
    parts_of(world.side).tier.note(TierDone(Counter({orders.sequence: 1})))
    assert world.side.status()["tier"]["holds"] == 0


# Compressed documents.

FIRST = 2 * SIZE + 1
KEPT = DOCUMENT[FIRST : FIRST + 3]


def compress(world: Restoring) -> Any:
    """Three tokens of the document are those of a compressed one. Options that name it."""
    freezing, request = parts_of(world.side).freezing, world.add(PROMPT)
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    blocks = world.pool.get_new_blocks(1)
    tokens, held = np.array(KEPT, np.int32), [block.block_id for block in blocks]
    part = FrozenPart(tracked.prompt.namespace, held, None, tokens)
    assert freezing.entries.add(FreezeOrder("a", 0, 1, 0), part)
    world.pool.free_blocks(blocks)
    world.side.finished(request, [])
    return OPTIONS | {"segreuse_documents": ["a"], "segreuse_min_reused_tokens": 1}


def test_nothing_behind_a_named_document_is_restored(world: Restoring) -> None:
    """Its own tokens are the kept ones, and text behind it was computed behind others."""
    options = compress(world)
    admitted = world.admit(PROMPT, options)
    plan = admitted.plan
    assert plan is not None
    assert (plan.begin, plan.start) == (0, 2 * SIZE), "whole blocks in front of it are"
    assert plan.pieces.where(plan.pieces.destination == FIRST).source.tolist() == [Tier.GPU]
    world.reported(admitted)
    assert world.named(admitted.request) == [0, 1]


def test_a_cold_document_may_be_anywhere(world: Restoring) -> None:
    options = OPTIONS | {"segreuse_documents": ["a"]}
    admitted = world.admit(PROMPT, options)
    assert admitted.plan is not None
    assert admitted.plan.num_restored == 0
    assert world.named(admitted.request) == []


@pytest.mark.parametrize(
    "order",
    [
        {"segreuse_score": ScoreOrder(0, SIZE, 2).encode()},
        {"segreuse_copy": CopyOrder(DOCUMENT, [1, 2]).encode()},
    ],
    ids=["score", "copy"],
)
def test_orders_that_compress_are_not_restored(world: Restoring, order: Any) -> None:
    """What an order says is not the prompt's own prefix."""
    admitted = world.admit([*DOCUMENT, *DOCUMENT, 9], OPTIONS | order)
    assert (admitted.plan, admitted.supplied) == (None, 0)


def test_what_is_behind_a_named_document_has_no_exact_record() -> None:
    """Also if all of it was computed, while the document was cold."""
    world = Restoring()
    named = OPTIONS | {"segreuse_documents": ["a"]}
    admitted = world.admit(PROMPT, named)
    assert admitted.plan is None
    world.end(admitted)
    world.report(world.evict_all())
    tier = parts_of(world.side).tier
    assert tier is not None
    assert world.side.status()["tier"]["host"] == BLOCKS, "they are stored, and donate"
    names = [make_block_hash_with_group_id(h, 0) for h in admitted.request.block_hashes]
    assert [tier.exact_entry(name) for name in names] == [-1] * BLOCKS
    again = world.admit(PROMPT)
    assert again.plan is not None
    assert (again.plan.num_restored, again.plan.num_reused) == (0, len(DOCUMENT))
