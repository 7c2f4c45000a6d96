# SPDX-License-Identifier: Apache-2.0
"""A batch lays its plans out as a loop over their tokens would."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.tiny import CHANNELS, KV_HEADS, LAYOUT, SIZE, make_plan
from vllm_segreuse.kernels.pages import flat_pages
from vllm_segreuse.plan import Fixed, Gather, Probed, ReusePlan
from vllm_segreuse.prefill.batch import Batch

CPU = torch.device("cpu")


def plans(**recipe: Any) -> list[ReusePlan]:
    """One with a token to come that begins a block, one that begins within a block, and one of a
    single token."""
    return [
        make_plan("a", 4, [0, 5], 8, np.array([7, 3, 5, 1]), [49], **recipe),
        make_plan("b", 6, [2, 3], 5, np.array([9, 8, 2]), probes=[3], **recipe),
        make_plan("c", 0, [0], 1, np.array([4]), **recipe),
    ]


def by_hand(given: list[ReusePlan]) -> list[tuple[int, int, int, int]]:
    """(request, position, token id, slot) of every token."""
    rows = []
    for number, plan in enumerate(given):
        ids = [*plan.token_ids.tolist(), *plan.suffix.tolist()]
        for position, token in enumerate(ids, plan.start):
            block = int(plan.block_ids[position // SIZE])
            rows.append((number, position, token, block * SIZE + position % SIZE))
    return rows


def test_every_token_has_its_request_its_position_and_its_slot() -> None:
    given = plans()
    batch = Batch(given, SIZE, CPU)
    tokens = batch.tokens
    columns = (tokens.request, tokens.positions, tokens.token_ids, tokens.slots)
    assert [*zip(*(column.tolist() for column in columns), strict=True)] == by_hand(given)
    assert all(column.dtype == torch.int64 for column in columns)
    assert batch.bounds.tolist() == [0, 9, 14, 15]
    assert batch.everything.device.tolist() == list(range(15))
    assert tokens.host is not None
    assert tokens.host.positions.tolist() == tokens.positions.tolist()
    assert tokens.host.request.tolist() == tokens.request.tolist()


def test_block_tables_are_rows_of_one_width() -> None:
    batch = Batch(plans(), SIZE, CPU)
    assert batch.block_tables.tolist() == [[7, 3, 5, 1], [9, 8, 2, 0], [4, 0, 0, 0]]
    assert batch.block_tables.dtype == torch.int32


def test_the_suffix_is_always_computed_and_probed() -> None:
    batch = Batch(plans(), SIZE, CPU)
    assert batch.always.device.tolist() == [0, 5, 8, 11, 12, 14]
    assert batch.probes.device.tolist() == [0, 5, 8, 12, 14]
    assert batch.counts(batch.probes) == [3, 1, 1]
    assert batch.counts(batch.always) == [3, 2, 1]
    for index in (batch.always, batch.probes):
        assert index.host is not None
        assert index.host.tolist() == index.device.tolist()
        assert len(index) == len(index.device)


def test_active_tokens_are_counted_by_plan() -> None:
    """Without the suffix, which is the ninth token here: vLLM computes that."""
    batch = Batch(plans(), SIZE, CPU)
    assert batch.suffix.device.tolist() == [8]
    assert batch.num_active(torch.tensor([7, 8, 9, 10, 13])).tolist() == [1, 3, 0]
    assert batch.num_active(torch.tensor([], dtype=torch.int64)).tolist() == [0, 0, 0]


def test_held_is_what_the_slots_hold() -> None:
    batch = Batch(plans(), SIZE, CPU)
    cache = torch.randn(10, 2, KV_HEADS, SIZE, CHANNELS)
    for part, strides in enumerate((LAYOUT.keys, LAYOUT.values)):
        held = batch.held(flat_pages(cache), strides, slice(None), 0)
        for row, slot in enumerate(batch.tokens.slots.tolist()):
            assert torch.equal(held[row], cache[slot // SIZE, part, :, slot % SIZE])


def test_its_program_is_that_of_its_plans() -> None:
    program = Probed(Gather.MAX, 0.25)
    assert Batch(plans(program=program, top_k=1), SIZE, CPU).program == program
    assert Batch(plans(), SIZE, CPU).program == Fixed()


def test_part_of_what_the_slots_hold() -> None:
    batch = Batch(plans(), SIZE, CPU)
    cache = torch.randn(10, 2, KV_HEADS, SIZE, CHANNELS)
    pages = flat_pages(cache)
    for strides in (LAYOUT.keys, LAYOUT.values):
        whole = batch.held(pages, strides, slice(None), 0)
        assert torch.equal(batch.held(pages, strides, slice(7, 12), 0), whole[7:12])


@pytest.mark.parametrize(
    ("chunk_work", "most", "layers", "tokens"),
    [
        (None, 50, 3, 50),
        (30, 50, 3, 10),
        (32, 50, 3, 10),
        (33, 50, 3, 11),
        (30, 9, 3, 9),
        (2, 50, 3, 1),  # less than a token would never end
        (30, 50, 1, 30),
        (30, 50, 0, 30),
    ],
)
def test_a_chunk_is_no_more_than_others_may_wait_for(
    chunk_work: int | None, most: int, layers: int, tokens: int
) -> None:
    assert Batch(plans(), SIZE, CPU, chunk_work).chunk_tokens(most, layers) == tokens


def test_the_token_behind_each_is_known_but_for_the_last_of_some_plans() -> None:
    """Where vLLM is to compute it, or nobody knows it."""
    first, second, third = plans()
    second.token_at_stop = 77
    given = [first, second, third]
    batch = Batch(given, SIZE, CPU)
    ids = batch.tokens.token_ids.tolist()
    assert len(first.suffix)
    assert batch.following().tolist() == [*ids[1:9], -1, *ids[10:14], 77, -1]
    assert batch.tokens.token_ids.tolist() == ids


def test_which_tokens_were_computed_is_told_by_request_and_in_order() -> None:
    batch = Batch(plans(), SIZE, CPU)
    active = torch.tensor([13, 8, 10, 0, 14])
    assert batch.positions(active, {"a", "b"}) == {"a": (4, 12), "b": (7, 10)}
    assert batch.positions(active, ["c"]) == {"c": (0,)}
    assert batch.positions(active, {"nobody"}) == {}
    assert batch.positions(active, ()) == {}
