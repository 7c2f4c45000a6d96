# SPDX-License-Identifier: Apache-2.0
"""What vLLM evicts is stored and reused, through the scheduler's side and vLLM's own block pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.parts import parts_of
from tests.test_scheduler import DOCUMENT, OPTIONS, PROMPT, SIZE, World
from tests.tier.fakes import ROW_BYTES, Region
from vllm_segreuse.plan import ReusePlan, Tier, TierDone, TierOrders
from vllm_segreuse.scheduling.plan_maker import PlanMaker

EXPLAIN = OPTIONS | {"segreuse_explain": True}
ROWS = 16


class Tiered(World):
    """With a second tier, and a worker that reports at once."""

    def __init__(self, files: dict[str, Any] | None = None, **options: Any) -> None:
        tier = {"host_gib": 1, "min_run_tokens": SIZE} | (files or {})
        self.region = Region(ROWS)
        super().__init__(region=self.region, tier=tier, **options)

    def end_step(self, runs_model: bool = True) -> tuple[list[ReusePlan], TierOrders | None]:
        """A step leaves."""
        step = self.side.take_step(runs_model)
        return step.plans, step.messages.get("tier")

    def report(  # type: ignore[override]
        self, orders: TierOrders | None, other_weights: bool = False
    ) -> None:
        """The worker is done with it."""
        if orders is not None:
            done = TierDone(Counter({orders.sequence: 1}))
            done.other_weights = {orders.sequence} if orders.verify and other_weights else set()
            parts_of(self.side).tier.note(done)

    def evict_all(self) -> TierOrders | None:
        """Every free block is taken for something else, which ends unnamed."""
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks()))
        _, orders = self.end_step()
        return orders


@pytest.fixture
def world() -> Tiered:
    """A document that was evicted, and is in host memory."""
    tiered = Tiered()
    tiered.run(tiered.add(DOCUMENT))
    tiered.end_step()
    orders = tiered.evict_all()
    assert orders is not None
    assert len(orders.blocks) == len(DOCUMENT) // SIZE
    tiered.report(orders)
    return tiered


def test_an_idle_engine_steps_until_what_is_evicted_is_stored() -> None:
    tiered = Tiered()
    tiered.run(tiered.add(DOCUMENT))
    tiered.end_step()
    assert not tiered.side.has_pending_work
    pool = tiered.pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    assert tiered.side.has_pending_work, "blocks are to be copied"
    _, orders = tiered.end_step()
    assert tiered.side.has_pending_work, "workers have not reported"
    tiered.report(orders)
    assert not tiered.side.has_pending_work


def test_an_evicted_document_is_reused_from_host_memory(world: Tiered) -> None:
    request = world.add(PROMPT, EXPLAIN)
    assert world.match(request, 0) == len(PROMPT) - 1
    blocks = [block.block_id for block in world.pool.get_new_blocks(len(PROMPT) // SIZE + 1)]
    world.side.allocated(request, blocks)
    (plan,), orders = world.end_step()
    assert orders is not None
    assert not len(orders.rows)
    assert (plan.pieces.source == Tier.HOST).all()
    assert plan.donor_blocks == []
    assert world.side.status()["tier"]["holds"] == 1
    report = world.side.finished(request, [])
    assert report is not None
    assert report.get("tiered_tokens", 0) == report["reused_tokens"] == len(DOCUMENT)
    segment = next(each for each in report["explain"] if each["source"] == "segment")
    assert (segment["tokens"], segment["tier"]) == (len(DOCUMENT), "host")
    assert world.side.status()["tier"]["holds"] == 1, "the worker still reads it"
    world.report(orders)
    assert world.side.status()["tier"] == {"host": 8, "disk": 0, "holds": 0, "steps": 0, "jobs": 0}
    data = world.stats.data
    assert data["tokens_total"]["tiered"] == len(DOCUMENT)
    assert data["tier_tokens_total"] == {"stored": len(DOCUMENT), "loaded": len(DOCUMENT)}
    assert [data["tier_records"][tier][-1] for tier in ("host", "disk")] == [8, 0]
    assert [data["tier_bytes"][tier][-1] for tier in ("host", "disk")] == [8 * ROW_BYTES, 0]


def test_records_in_short_runs_are_found_and_computed() -> None:
    tiered = Tiered({"min_run_tokens": len(DOCUMENT) + 1})
    tiered.run(tiered.add(DOCUMENT))
    tiered.end_step()
    tiered.report(tiered.evict_all())
    other = [*range(300, 332)]
    tiered.run(tiered.add(other))
    request = tiered.add([7, *other, 8, *DOCUMENT, 9], EXPLAIN)
    tiered.run(request)
    report = tiered.side.finished(request, [])
    assert report is not None
    assert report.get("tiered_tokens", 0) == 0
    assert [each.get("reason", each["source"]) for each in report["explain"]] == [
        *("shorter_than_block", "segment", "not_worth_it", "last_token")
    ]


def test_a_plan_without_blocks_holds_no_rows(world: Tiered) -> None:
    request = world.add(PROMPT)
    assert world.match(request, 0)
    plans, orders = world.end_step()
    assert (plans, orders) == ([], None)
    assert world.side.status()["tier"]["holds"] == 0
    assert world.match(request, 0), "it is made anew"
    world.side.finished(request, [])
    assert world.side.status()["tier"]["holds"] == 0


def test_an_error_over_a_request_holds_no_rows(
    world: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr(PlanMaker, "make", fail)
    assert world.match(world.add(PROMPT), 0) == 0
    assert world.side.status()["tier"]["holds"] == 0


def test_what_is_only_observed_holds_no_rows(world: Tiered) -> None:
    request = world.add(PROMPT, OPTIONS | {"segreuse_observe": True})
    assert world.match(request, 0) == 0
    tracked = parts_of(world.side).planner.get(request.request_id)
    assert tracked is not None
    assert tracked.observed is not None
    assert tracked.observed.pieces.num_tiered == len(DOCUMENT)
    assert world.side.status()["tier"]["holds"] == 0


def test_records_that_cannot_be_had_are_computed(
    world: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        parts_of(world.side).tier, "hold", lambda request_id, entries: 0 * entries - 1
    )
    request = world.add(PROMPT)
    assert world.match(request, 0) == 0
    world.side.allocated(request, [])
    assert world.side.finished(request, [])["bypass_reason"] == "too_few_reused_tokens"  # type: ignore[index]


def test_a_request_waits_for_records_that_are_on_their_way(
    world: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = world.add(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(parts_of(world.side).tier, "hold", lambda request_id, entries: None)
        assert world.match(request, 0) is None
    assert world.match(request, 0)


def test_a_request_that_runs_without_a_plan_waits_no_longer(
    world: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    over: list[str] = []
    monkeypatch.setattr(parts_of(world.side).tier, "left", over.append)
    request = world.add(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr(parts_of(world.side).tier, "hold", lambda request_id, entries: None)
        assert world.match(request, 0) is None
    assert over == []
    monkeypatch.setattr(
        parts_of(world.side).planner, "_search", lambda *args: None
    )  # they are lost
    assert world.match(request, 0) == 0
    world.side.allocated(request, [])
    assert over == [request.request_id]


def test_blocks_that_are_invalid_are_not_stored(world: Tiered) -> None:
    world.run(world.add([*range(300, 332)]))
    world.end_step()
    world.pool.evict_blocks({block.block_id for block in world.pool.blocks if block.block_hash})
    _, orders = world.end_step()
    assert orders is None


def test_a_reset_leaves_nothing_in_host_memory(world: Tiered) -> None:
    assert world.pool.reset_prefix_cache()
    assert world.side.status()["tier"]["host"] == 0
    assert len(world.index) == 0
    assert world.match(world.add(PROMPT), 0) == 0


def test_without_a_tier_there_are_no_orders() -> None:
    plain = World()
    plain.run(plain.add(DOCUMENT))
    plain.pool.get_new_blocks(plain.pool.get_num_free_blocks())
    assert plain.side.take_step(True).messages == {}
    plain.side.reported({"tier": TierDone(Counter({1: 1}))}, {}, {})
    assert "tier" not in plain.side.status()
    assert plain.index.num_blocks == plain.pool.num_gpu_blocks
