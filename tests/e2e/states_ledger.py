# SPDX-License-Identifier: Apache-2.0
"""Maps of states as both halves of an engine handle them, written down and compared.

A map that the workers have noted is remembered by its digest, its text and its namespace. Whenever
a plan composes it, it must still be that map, of the very tokens that stand in the plan, and the
state behind it must be what the map makes of the state in front.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from segreuse_extras.states.layers import SegmentMap
from segreuse_extras.states.messages import Captured, CaptureOrder, Placed
from segreuse_extras.states.metrics import EVICTED, NOTED
from segreuse_extras.states.prefill import CarriedOut, StatesPrefill
from segreuse_extras.states.recurrent import AffineMap
from segreuse_extras.states.scheduler import SegmentStates
from tests.e2e.engine import Engine
from tests.parts import parts_of
from vllm_segreuse.compat.block_events import BlockListener
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.plan import ReusePlan
from vllm_segreuse.prefill.proofs.scratch import relative_error

COMPOSED = 1e-5
"""How far a composed state may be from the same product in float64, as a share of its norm."""
REPEATED, REPEATED_OFF = 7, 1e-3
"""One plan of so many is carried out twice; how far what it leaves may be apart then."""


class Noted(NamedTuple):
    """A map that was ordered.

    Attributes:
        namespace: its digest.
        tokens: of the segment.
        order: of the workers.
        prompt: of the request that it is noted of.
    """

    namespace: int
    tokens: bytes
    order: CaptureOrder
    prompt: list[int]


class Plan(NamedTuple):
    """What a request was composed of, the last time that it was planned.

    Attributes:
        made_of: donors and maps, and where they go.
        read: segments that were read again.
        moved: tokens that were not computed.
    """

    made_of: bytes
    read: tuple[Placed, ...]
    moved: int


class _Evictions(BlockListener):
    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def evicted(self, block_ids: Sequence[int]) -> None:
        self._counts["kv_evicted"] += len(block_ids)


class Ledger:
    """Of one engine.

    Attributes:
        counts: what was compared, and what happened.
        worst: largest deviations, as shares of norms: "composed" states, and what a plan leaves
            that is carried out once more ("repeated").
        plans: by request, the last one.
        composed: requests that have ever been given a token that was not computed.
        noted: what was ordered, by number.
    """

    def __init__(self, running: Engine) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        parts = parts_of(running.scheduler.connector.scheduler_side)
        found = parts.feature["states"]
        assert isinstance(found, SegmentStates)
        self.feature, self._core = found, parts.core
        self.prefill: StatesPrefill = get_kv_transfer_group().worker_side.backlog.prefill
        self._running = running
        self.counts: Counter[str] = Counter()
        self.worst: dict[str, float] = {"composed": 0.0, "repeated": 0.0}
        self.plans: dict[str, Plan] = {}
        self.composed: set[str] = set()
        self.noted: dict[int, Noted] = {}
        self.wanted: dict[int, SegmentMap | None] = {}
        """Maps that are kept for whoever has asked for them, by number."""
        self._digests: dict[int, bytes] = {}
        self._seen_plans = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Write down what happens meanwhile."""
        feature, prefill, core = self.feature, self.prefill, self._core
        core.pool.listen(_Evictions(self.counts))
        wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
            (feature, "_note", self._noting),
            (feature, "finished", self._finished),
            (prefill.captures, "take", self._take),
            (prefill, "go_on", self._go_on),
            (prefill, "carry_out", self._carry_out),
            (prefill.state_layers, "compose", self._compose),
            (core.stats, "inc", self._counted),
        ]
        with ExitStack() as stack:
            for owner, name, wrapper in wrapped:
                stack.enter_context(patch.object(owner, name, wrapper(getattr(owner, name))))
            yield

    # The scheduler's half.

    @property
    def orders(self) -> list[CaptureOrder]:
        """Those of the step that is being planned."""
        orders: list[CaptureOrder] = self.feature._step.orders
        return orders

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(tracked: Any, finder: Any) -> None:
            before = len(self.orders)
            original(tracked, finder)
            space = self._core.namespaces.digest(tracked.prompt.namespace)
            for order in self.orders[before:]:
                tokens = tracked.prompt.tokens[order.first : order.stop].tobytes()
                prompt = tracked.prompt.tokens.tolist()
                self.noted[order.segment] = Noted(space, tokens, order, prompt)

        return note

    def _finished(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finished(ending: Any) -> None:
            for kind in ("reused", "prefix"):
                self.counts[f"reported_{kind}"] += (ending.report or {}).get(f"{kind}_tokens", 0)
            self.counts["reported_requests"] += ending.report is not None
            original(ending)

        return finished

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def inc(name: str, n: int = 1, **labels: str) -> None:
            if name in (NOTED, EVICTED):
                self.counts[name] += n
            elif name == "requests_total":
                self.counts["counted_requests"] += n
            elif name == "tokens_total" and labels["kind"] in ("reused", "prefix"):
                self.counts[f"counted_{labels['kind']}"] += n
            original(name, n, **labels)

        return inc

    # The workers' half.

    def _take(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def take() -> Captured | None:
            captured: Captured | None = original()
            for number in () if captured is None else captured.complete:
                found = self.prefill.captures.maps[number]
                self._digests[number] = _digest(found)
                if number in self.wanted:
                    self.wanted[number] = found
            return captured

        return take

    def _carry_out(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def carry_out(plan: ReusePlan) -> CarriedOut:
            carried: CarriedOut = original(plan)
            self._seen_plans += 1
            moved = plan.reused & ~plan.recipe.settled
            for it in carried.read:
                moved[it.first - plan.start : it.stop - plan.start] = False
            made_of = self._made_of(plan)
            self.plans[plan.request_id] = Plan(made_of, (*carried.read,), int(moved.sum()))
            if moved.any():
                self.composed.add(plan.request_id)
                if self._seen_plans % REPEATED == 0:
                    self._repeat(original, plan, carried)
            return carried

        return carry_out

    def _made_of(self, plan: ReusePlan) -> bytes:
        """Donors, maps, and which tokens are computed."""
        pieces, given = plan.pieces, self.prefill.given[plan.request_id]
        parts = [pieces.destination, pieces.length, pieces.block, pieces.offset]
        parts += [plan.recipe.settled, np.asarray(given.segments), np.asarray([plan.start])]
        return b"|".join(part.tobytes() for part in parts)

    def _repeat(self, original: Callable[..., Any], plan: ReusePlan, carried: CarriedOut) -> None:
        """Carried out afresh, a plan leaves the same."""
        left = self._left_by(plan)
        with self.prefill.captures.resting():
            self.prefill.prepare([plan])
            again = original(plan)
        assert again.read == carried.read, f"{plan.request_id}: other segments are read again"
        both = zip(left, self._left_by(plan), strict=True)
        worst = max(relative_error(mine, wanted) for mine, wanted in both)
        self.worst["repeated"] = max(self.worst["repeated"], worst)
        assert worst < REPEATED_OFF
        self.counts["repeated"] += 1

    def _left_by(self, plan: ReusePlan) -> list[torch.Tensor]:
        """States, and keys and values of its tokens."""
        running = self.prefill.given[plan.request_id].running
        states = [part for held in self.prefill.state_layers.held(running) for part in held]
        for layer in self.prefill.kv:
            pages = typed_pages(layer.attention)[plan.block_ids.tolist()]
            states += [
                part.tokens(pages)[plan.start : plan.stop].clone()
                for part in (layer.layout.keys, layer.layout.values)
            ]
        return states

    def _go_on(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def go_on(plan: ReusePlan, at: int, composed: Sequence[Placed], *given: Any) -> bool:
            tracked = self._core.requests.get(plan.request_id)
            for it in composed:
                noted = self.noted[it.segment]
                tokens = plan.token_ids[it.first - plan.start : it.stop - plan.start]
                assert noted.tokens == tokens.astype(np.int32).tobytes(), "a map of other text"
                if tracked is not None:
                    space = self._core.namespaces.digest(tracked.prompt.namespace)
                    assert noted.namespace == space, "a map of another namespace"
                found = self.prefill.captures.maps[it.segment]
                assert _digest(found) == self._digests[it.segment], "a map has changed"
            return bool(original(plan, at, composed, *given))

        return go_on

    def _compose(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compose(running: Sequence[int], segment: SegmentMap) -> None:
            layers = self.prefill.state_layers
            before = layers.held(running)
            original(running, segment)
            for was, of_layer, found in zip(before, segment, layers.held(running), strict=True):
                assert torch.equal(found[0], of_layer.tail)
                if not isinstance(of_layer, AffineMap):
                    continue
                product, state = of_layer.product.double(), was[1].double()
                # Of a head, a matrix or a number.
                faded = product @ state if product.shape[-1] > 1 else product * state
                wanted = faded + of_layer.added.double()
                worst = float((found[1] - wanted).norm() / wanted.norm())
                self.worst["composed"] = max(self.worst["composed"], worst)
                assert worst < COMPOSED
            self.counts["composed"] += 1

        return compose

    # Whoever drives the engine.

    def check_names(self) -> None:
        """Nothing behind a plan's start has an exact name, of any group."""
        pool, size = self._core.pool, self._core.block_size
        for request in self._running.scheduler.running:
            tracked = self._core.requests.get(request.request_id)
            if tracked is None or tracked.plan is None:
                continue
            first = tracked.plan.start // size
            for table in self._core.manager.coordinator.get_blocks(request.request_id):
                behind = [block for block in table[first:] if not block.is_null]
                self.counts["names"] += len(behind)
                named = [it.block_id for it in behind if pool.is_exact(it.block_id)]
                assert not named, f"{request.request_id}: {named} have exact names"

    def check_maps(self) -> None:
        """Nothing runs, and all that was dropped is told: both halves have the same maps, whole
        ones, no more than there is room for, and counters say how many there were."""
        captures, catalogue = self.prefill.captures, self.feature.catalogue
        assert _left(captures) <= {"maps"}
        assert _left(self.feature) == set()
        assert {*captures.maps} == {it.number for it in catalogue}
        assert catalogue.num_ready == len(catalogue) <= catalogue.capacity
        each = self.prefill.state_layers.map_bytes
        held = sum(layer.num_bytes for found in captures.maps.values() for layer in found)
        assert held == each * len(captures.maps)
        self.counts["most_map_bytes"] = max(self.counts["most_map_bytes"], held)
        left = self.counts[NOTED] - self.counts[EVICTED] - self.counts["forgotten"]
        assert left == len(catalogue), "counters of maps do not add up"
        for kind in ("reused", "prefix", "requests"):
            assert self.counts[f"counted_{kind}"] == self.counts[f"reported_{kind}"], kind

    def forgetting(self) -> None:
        """The prefix cache is about to be reset."""
        self.counts["forgotten"] += self.feature.catalogue.num_ready

    def exact_notes(self) -> list[int]:
        """Maps that are there and were noted of requests that computed all of their prompt."""
        requests = {
            it.number: self.noted[it.number].order.request_id for it in self.feature.catalogue
        }
        return [number for number, request in requests.items() if request not in self.composed]


def _digest(segment: SegmentMap) -> bytes:
    found = blake2b(digest_size=16)
    for layer in segment:
        for part in layer.parts:
            found.update(part.contiguous().view(torch.uint8).numpy())
    return found.digest()


def _left(half: object) -> set[str]:
    """Names of the dictionaries of an object that hold something."""
    return {name for name, held in vars(half).items() if isinstance(held, dict) and held}
