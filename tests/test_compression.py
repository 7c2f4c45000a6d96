# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of compressed documents: what the workers are asked, and what is frozen."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from vllm.v1.request import Request

from segreuse_extras.compressed.compression import Compression, Kept
from segreuse_extras.compressed.orders import AnchorOrder, CopyOrder, ScoreOrder
from segreuse_extras.compressed.scheduler import CompressedDocuments
from tests.compat.managed import SIZE, Managed, ids
from tests.parts import parts_of
from vllm_segreuse.config import RequestOptions
from vllm_segreuse.features.knowledge.frozen import FrozenPart
from vllm_segreuse.options.parsing import ParsedRequest
from vllm_segreuse.plan import Gather, PlanOutcome, Probed
from vllm_segreuse.scheduling.feature import Admitted
from vllm_segreuse.scheduling.tracked import Bypass, TrackedRequest

DOCUMENT = [*range(100, 100 + 3 * SIZE)]


class World:
    def __init__(self) -> None:
        self.managed = Managed()
        self.entries: Any = SimpleNamespace(compressed=self._compressed)
        self.parts: dict[tuple[str, int], list[FrozenPart]] = {}
        self.compression = Compression(self.managed.pool, self.entries, SIZE)

    def _compressed(
        self, name: str, namespace: int, so_far: bool = False
    ) -> list[FrozenPart] | None:
        is_whole = not name.endswith("-chunks")
        return self.parts.get((name, namespace)) if is_whole or so_far else None

    def ordered(
        self, tokens: list[int], score: Any = None, copy: Any = None, anchors: Any = None
    ) -> TrackedRequest:
        request = self.managed.request(tokens)
        tracked = self.managed.tracked(request)
        tracked.mode = Bypass("knowledge_base")
        asked = ParsedRequest(None, Mock(), score=score, copy=copy, anchors=anchors)
        self.compression.order(tracked, request, asked)
        return tracked


def kept_of(world: World, tracked: TrackedRequest) -> Kept:
    """What the part is made of that the request makes."""
    part: Any = world.compression.part(tracked)
    kept: Kept = part.args[1]
    return kept


@pytest.fixture
def world() -> World:
    return World()


def test_a_score_probes_the_chunk_with_the_chunk(world: World) -> None:
    first, stop = 2, 3 * SIZE
    order = ScoreOrder(first, stop, 4)
    tracked = world.ordered([*DOCUMENT, *DOCUMENT[first:], 1], score=order.encode())
    reused = np.arange(2 * stop - first) < stop
    segments: Any = None
    recipe = tracked.method.make_recipe(reused, segments)
    assert recipe.program == Probed(Gather.MAX)
    assert recipe.top_k == 4
    assert np.flatnonzero(recipe.probes).tolist() == [*range(stop, 2 * stop - first)]
    wanted = [*range(first), *range(stop, 2 * stop - first)]
    assert np.flatnonzero(recipe.always).tolist() == wanted, "the context is no candidate"
    assert (tracked.bypass, tracked.donates, tracked.is_required) == (None, False, True)
    assert tracked.exact_stop == 0, "a prefix hit would be computed in another context"


def test_without_its_source_a_score_chooses_nothing(world: World) -> None:
    tracked = world.ordered([*DOCUMENT, *DOCUMENT, 1], score=[0, 3 * SIZE, 4])
    segments: Any = None
    recipe = tracked.method.make_recipe(np.zeros(6 * SIZE, np.bool_), segments)
    assert not recipe.top_k
    assert recipe.always.all()


def chosen(world: World, *positions: int, **outcome: Any) -> list[int] | None:
    tracked = world.ordered([*DOCUMENT, *DOCUMENT, 1], score=[2, 10, 3])
    done = PlanOutcome(9, positions=positions, **outcome)
    assert world.compression.carried_out(tracked.request_id, done)
    assert not world.compression.carried_out("another", done)
    return world.compression.ended(tracked.request_id)


def test_what_was_chosen_is_what_was_computed_of_the_chunk(world: World) -> None:
    assert chosen(world, 0, 1, 4, 5, 9, 10, 11) == [4, 5, 9]
    assert world.compression.ended("nobody") is None


def test_what_a_score_has_computed_is_not_counted_as_a_plan_of_somebodys(world: World) -> None:
    core: Any = SimpleNamespace(pool=world.managed.pool, block_size=SIZE)
    feature = CompressedDocuments(core, world.entries)
    request: Any = world.managed.request([*DOCUMENT, *DOCUMENT, 1])
    assert not feature.outcome(request, None, PlanOutcome(9))
    tracked, asked = world.managed.tracked(request), ParsedRequest(None, Mock(), score=[2, 10, 3])
    feature.compression.order(tracked, request, asked)
    assert feature.outcome(request, tracked, PlanOutcome(9))


def test_a_choice_that_is_none_is_not_reported(world: World) -> None:
    assert chosen(world, 0, 1, 4, 5, 11) is None, "too few"
    assert chosen(world, 4, 5, 9, in_full=True) is None, "everything was computed"
    tracked = world.ordered([*DOCUMENT, *DOCUMENT, 1], score=[2, 10, 3])
    assert world.compression.ended(tracked.request_id) is None, "no plan was carried out"


def source_of(world: World) -> list[int]:
    """Blocks of the document, which was computed."""
    request = world.managed.request(DOCUMENT)
    blocks = world.managed.named(request)
    world.managed.pool.begin_step()
    return ids(blocks)


def test_a_copy_is_taken_from_the_blocks_of_its_source(world: World) -> None:
    blocks = source_of(world)
    kept = [1, 2, SIZE + 1, 3 * SIZE - 1]
    copy = CopyOrder(DOCUMENT, kept).encode()
    tracked = world.ordered([DOCUMENT[i] for i in kept] + [7] * 5, copy=copy)
    found = tracked.method.finder.find(tracked.prompt, 0, 8)
    assert found.pieces.block.tolist() == [blocks[0], blocks[1], blocks[2]]
    assert found.pieces.position.tolist() == [1, SIZE + 1, 3 * SIZE - 1]
    assert tracked.method.min_reused_tokens == 1
    assert kept_of(world, tracked) == Kept(4, 4)
    assert tracked.exact_stop == 0, "its tokens as a text may be in vLLM's cache"
    segments: Any = None
    assert tracked.method.make_recipe(np.array([True, False]), segments).always.tolist() == [
        False,
        True,
    ]


def test_a_source_that_ends_within_a_block_has_its_filler(world: World) -> None:
    request = world.managed.request([*DOCUMENT[:-1], DOCUMENT[-2]])
    blocks = ids(world.managed.named(request))
    world.managed.pool.begin_step()
    copy = CopyOrder(DOCUMENT[:-1], [3 * SIZE - 2]).encode()
    tracked = world.ordered([DOCUMENT[-2]] * 5, copy=copy)
    assert tracked.method.finder.find(tracked.prompt, 0, 4).pieces.block.tolist() == [blocks[2]]


def test_another_text_is_no_source(world: World) -> None:
    source_of(world)
    other = [*DOCUMENT]
    other[0] += 1
    tracked = world.ordered([5] * 5, copy=CopyOrder(other, [SIZE]).encode())
    assert tracked.method.finder.find(tracked.prompt, 0, 4).num_tokens == 0


def test_anchors_are_kept_behind_those_of_earlier_chunks(world: World) -> None:
    kept = np.array([21, 22], np.int32)
    prompt = [1, 21, 22, *DOCUMENT[:SIZE], 21, 22]
    here = world.managed.tracked(world.managed.request(prompt)).prompt.namespace
    world.parts["a-chunks", here] = [FrozenPart(here, [5], None, kept, 1)]
    tracked = world.ordered(prompt, anchors=AnchorOrder("a-chunks", 2, 2).encode())
    found = tracked.method.finder.find(tracked.prompt, 0, len(prompt) - 1)
    assert found.pieces.rows() == [[1, 2, 5, 1, 1]]
    assert (kept_of(world, tracked), tracked.exact_stop) == (Kept(2, 2), 0)
    assert (tracked.bypass, tracked.donates, tracked.is_required) == (None, False, True)
    segments: Any = None
    assert tracked.method.make_recipe(np.array([True, False]), segments).always.tolist() == [
        False,
        True,
    ]


def naming(world: World, request: Request) -> TrackedRequest:
    """The request names a document that begins with the second token of its second block."""
    tracked = world.managed.tracked(request)
    here = tracked.prompt.namespace
    kept = np.array(DOCUMENT[SIZE + 1 : SIZE + 3], np.int32)
    world.parts["a", here] = [FrozenPart(here, [5], None, kept)]
    world.compression.name(tracked, ["a"])
    assert tracked.exact_stop == SIZE + 1
    return tracked


def test_behind_a_named_document_nothing_has_an_exact_name(world: World) -> None:
    request = world.managed.request(DOCUMENT)
    naming(world, request)
    world.managed.named(request)
    pool = world.managed.pool
    assert [pool.get_cached_block(name, [0]) is not None for name in request.block_hashes] == [
        True,
        False,
        False,
    ]


def test_a_prefix_hit_ends_in_front_of_a_named_document(world: World) -> None:
    """Somebody has computed the kept tokens as a text."""
    world.managed.computed(DOCUMENT)
    request = world.managed.request([*DOCUMENT, 9])
    manager = world.managed.manager
    found, hit, boundary = manager.get_computed_blocks(request)
    assert (len(found.blocks[0]), hit, boundary) == (3, 3 * SIZE, 0)
    naming(world, request)
    ended, hit, boundary = manager.get_computed_blocks(request)
    assert (list(ended.blocks[0]), hit, boundary) == ([found.blocks[0][0]], SIZE, 0)
    world.parts.clear()
    cold = world.managed.request([*DOCUMENT, 9])
    world.compression.name(world.managed.tracked(cold), ["a"])
    assert manager.get_computed_blocks(cold)[1] == 0


@pytest.mark.parametrize("donor_names", [True, False])
def test_text_behind_a_document_stands_in_no_known_context(world: World, donor_names: bool) -> None:
    """Its chained hashes are those of the kept tokens as a text."""
    donor, wanted = (world.managed.request([*DOCUMENT, 9]) for _ in range(2))
    if donor_names:
        naming(world, donor)
    blocks = ids(world.managed.named(donor))
    world.managed.side.take_step(True)
    tracked = world.managed.tracked(wanted) if donor_names else naming(world, wanted)
    pieces = tracked.method.finder.find(tracked.prompt, 0, 3 * SIZE).pieces
    is_donors = np.isin(pieces.block, blocks)
    by_place = dict(zip(pieces.destination[is_donors], pieces.in_context[is_donors], strict=True))
    assert by_place[0], "in front of it"
    assert not by_place[2 * SIZE], "behind it"
    if donor_names:
        assert by_place[SIZE], "the block's own context ends in front of it"


def test_a_request_for_exact_kv_computes_documents(world: World) -> None:
    tracked = world.managed.tracked(world.managed.request(DOCUMENT))
    exact = parts_of(world.managed.side).methods.finder(RequestOptions(policy="exact"))
    tracked.method = replace(tracked.method, finder=exact)
    world.compression.name(tracked, ["a"])
    assert tracked.method.finder is exact
    assert not tracked.names_documents


def test_audits_compare_nothing_with_kept_tokens_as_a_text(world: World) -> None:
    """Neither of requests that compress, nor of those that name what is compressed."""
    audit, drawn = parts_of(world.managed.side).feature["audit"], []
    audit.audits = Mock(draws=lambda *args: drawn.append(args) or False)
    named = world.managed.tracked(world.managed.request(DOCUMENT))
    world.compression.name(named, ["a"])
    ordered = world.ordered([*DOCUMENT, *DOCUMENT, 1], score=[0, 3 * SIZE, 4])
    plain = world.managed.tracked(world.managed.request(DOCUMENT))
    for tracked in (named, ordered, plain):
        tracked.report, tracked.plan = Mock(), Mock(num_reused=3)
        request: Any = SimpleNamespace(
            request_id=tracked.request_id,
            use_structured_output=False,
            num_prompt_tokens=9,
            mm_features=[],
        )
        audit.allocated(Admitted(request, tracked, Mock(), [], [], True))
    assert len(drawn) == 1, "the plain one"


def test_a_document_that_is_cold_may_be_anywhere(world: World) -> None:
    tracked = world.managed.tracked(world.managed.request(DOCUMENT))
    world.compression.name(tracked, ["a"])
    assert tracked.exact_stop == 0
    assert tracked.method.max_drift == math.inf


@pytest.mark.parametrize("order", [(0, 4, 4), (3, 9, 1)])
def test_an_order_to_score_is_read_as_it_was_written(order: tuple[int, int, int]) -> None:
    assert ScoreOrder.parse(ScoreOrder(*order).encode()) == ScoreOrder(*order)


@pytest.mark.parametrize("value", [[-1, 4, 2], [4, 4, 1], [0, 4, 0], [2, 4, 3]])
def test_what_is_no_order_to_score_is_refused(value: list[int]) -> None:
    with pytest.raises(ValueError, match="is no order to score"):
        ScoreOrder.parse(value)
