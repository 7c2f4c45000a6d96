# SPDX-License-Identifier: Apache-2.0
"""Plans whose layers have several block tables are laid out, and copied, as by each table alone."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.test_batch import CPU, by_hand, plans
from tests.prefill.tiny import CHANNELS, KV_HEADS, LAYOUT, SIZE
from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.pages import flat_pages
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.plan import OtherTable, Pieces, ReusePlan
from vllm_segreuse.prefill.align import Aligner, token_copies
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.tables import BlockTables

TABLES = ([17, 13, 15, 11], [19, 18, 12], [14]), ([27, 23, 25, 21], [29, 28, 22], [24])


def several() -> list[ReusePlan]:
    """With two tables beside their own."""
    return [
        replace(
            plan,
            others=tuple(
                OtherTable(np.asarray(tables[i], np.int32), plan.pieces.block + 10 * number)
                for number, tables in enumerate(TABLES, 1)
            ),
        )
        for i, plan in enumerate(plans())
    ]


def alone(table: int) -> list[ReusePlan]:
    """The same with one of the tables as their own."""
    if not table:
        return plans()
    return [
        replace(
            plan,
            block_ids=np.asarray(TABLES[table - 1][i], np.int32),
            pieces=replace(plan.pieces, block=plan.pieces.block + 10 * table),
        )
        for i, plan in enumerate(plans())
    ]


@pytest.mark.parametrize("table", [0, 1, 2])
def test_each_table_is_as_if_it_were_the_only_one(table: int) -> None:
    batch = Batch(several(), SIZE, CPU)
    tables = BlockTables(3, SIZE)
    one = Batch(alone(table), SIZE, CPU)
    assert torch.equal(tables.of(batch.block_tables, table), one.block_tables)
    there = tables.tokens(batch.tokens, batch.block_tables, table)
    assert there.slots.tolist() == [slot for *_, slot in by_hand(alone(table))]
    assert torch.equal(there.positions, batch.tokens.positions)
    some = torch.tensor([1, 4, 9, 14])
    assert torch.equal(batch.slots(some, table), one.tokens.slots[some])


@pytest.mark.parametrize("table", [0, 1, 2])
def test_what_slots_hold_is_read_in_the_table_of_the_layer(table: int) -> None:
    cache = torch.randn(32, 2 * KV_HEADS * SIZE * CHANNELS)
    pages = flat_pages(cache)
    found = Batch(several(), SIZE, CPU).held(pages, LAYOUT.keys, slice(2, 13), table)
    expected = Batch(alone(table), SIZE, CPU).held(pages, LAYOUT.keys, slice(2, 13), 0)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("table", [0, 1, 2])
def test_copies_read_and_write_in_one_table(table: int) -> None:
    def with_pieces(given: list[ReusePlan]) -> list[ReusePlan]:
        """Of the first plan, in two pieces."""
        blocks = [6, 2]
        pieces = Pieces.from_table([(5, 3, blocks[0], 1, 21), (8, 4, blocks[1], 0, 8)])
        others = tuple(
            it._replace(sources=pieces.block + 10 * number)
            for number, it in enumerate(given[0].others, 1)
        )
        if not others:
            pieces = replace(pieces, block=pieces.block + 10 * table)
        return [replace(given[0], pieces=pieces, others=others)]

    found = token_copies(with_pieces(several()), SIZE, skip_always=False, table=table)
    expected = token_copies(with_pieces(alone(table)), SIZE, skip_always=False)
    assert len(found) == 7
    assert found.source_slots.tolist() == expected.source_slots.tolist()
    assert found.target_slots.tolist() == expected.target_slots.tolist()
    assert found.deltas.tolist() == expected.deltas.tolist()


def test_in_full_only_its_own_slots_are_cleared_in_the_table_of_each_layer() -> None:
    """Those of a draft, which shares the first table, too. What begins within a block leaves what
    is in front of it, and what is behind its suffix."""
    kernels: Any = SimpleNamespace(align=reference.align, store=reference.store)
    layers = []
    for table in (0, 1, 2, 0):
        cache = torch.randn(32, 2, KV_HEADS, SIZE, CHANNELS)
        attention: Any = SimpleNamespace(kv_cache=cache, kv_cache_dtype="auto")
        layers.append(LayerKv(attention, LAYOUT, None, kernels, table=table))
    *own, _ = layers
    runner: Any = SimpleNamespace(
        known=own,
        layouts=[LAYOUT] * len(own),
        stack=SimpleNamespace(attention=[layer.attention for layer in own]),
        stage=SimpleNamespace(first=0),
        states=None,
    )
    expected = [layer.attention.kv_cache.clone() for layer in layers]
    for layer, cache in zip(layers, expected, strict=True):
        for *_, slot in by_hand(alone(layer.table)):
            layer.attention.kv_cache[slot // SIZE, :, :, slot % SIZE] = torch.nan
            cache[slot // SIZE, :, :, slot % SIZE] = 0
    prefill = SparsePrefill(runner, Aligner(layers))
    prefill.prepare([plan.without_copies() for plan in several()], apart=True)
    for layer, cache in zip(layers, expected, strict=True):
        assert torch.equal(layer.attention.kv_cache, cache)
