# SPDX-License-Identifier: Apache-2.0
"""Rows of the attention backend agree with a loop over the active tokens."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.prefill.rows import common_metadata
from vllm_segreuse.prefill.tokens import Index, TokenTable, row_starts

BLOCK_SIZE = 16


class Row(NamedTuple):
    """A contiguous run of one request's active positions."""

    request: int
    first: int
    last: int


@st.composite
def active(draw: st.DrawFn) -> list[list[int]]:
    """Active positions of each request, ascending; each has some."""
    positions = st.sets(st.integers(0, 100), min_size=1, max_size=60)
    return [sorted(chosen) for chosen in draw(st.lists(positions, min_size=1, max_size=4))]


def rows_of(chosen: list[list[int]]) -> list[Row]:
    rows: list[Row] = []
    for request, positions in enumerate(chosen):
        for position in positions:
            if rows and rows[-1].request == request and rows[-1].last == position - 1:
                rows[-1] = rows[-1]._replace(last=position)
            else:
                rows.append(Row(request, position, position))
    return rows


def table_of(chosen: list[list[int]]) -> TokenTable:
    request = torch.tensor([r for r, positions in enumerate(chosen) for _ in positions])
    positions = torch.tensor([p for positions in chosen for p in positions])
    return TokenTable(positions + 7000, positions, request, 1000 * request + positions)


@given(active())
def test_a_row_begins_where_a_run_or_a_request_begins(chosen: list[list[int]]) -> None:
    tokens = table_of(chosen)
    expected = {(row.request, row.first) for row in rows_of(chosen)}
    starts = row_starts(tokens)
    found = zip(tokens.request[starts].tolist(), tokens.positions[starts].tolist(), strict=True)
    assert set(found) == expected
    assert int(starts.sum()) == len(expected)


@given(active())
def test_each_run_is_a_row_that_ends_with_it(chosen: list[list[int]]) -> None:
    tokens, rows = table_of(chosen), rows_of(chosen)
    block_tables = torch.arange(len(chosen) * 7, dtype=torch.int32).view(len(chosen), 7)
    common = common_metadata(tokens, block_tables)

    lengths = [row.last - row.first + 1 for row in rows]
    assert common.num_reqs == len(rows)
    assert common.num_actual_tokens == len(tokens) == sum(lengths)
    assert common.query_start_loc.tolist() == np.cumsum([0, *lengths]).tolist()
    assert common.query_start_loc_cpu.tolist() == common.query_start_loc.tolist()
    assert common.seq_lens.tolist() == [row.last + 1 for row in rows]
    assert common.max_query_len == max(lengths)
    assert common.max_seq_len == max(row.last + 1 for row in rows)
    expected = torch.stack([block_tables[row.request] for row in rows])
    assert torch.equal(common.block_table_tensor, expected)
    assert common.block_table_tensor.is_contiguous()
    assert torch.equal(common.slot_mapping, tokens.slots)
    assert common.causal
    for tensor in (common.query_start_loc, common.seq_lens, common.block_table_tensor):
        assert tensor.dtype == torch.int32


def test_neighbouring_positions_of_two_requests_are_two_rows() -> None:
    assert row_starts(table_of([[4, 5], [6, 7]])).tolist() == [True, False, True, False]


@given(active(), st.data())
def test_a_part_of_the_tokens_keeps_everything_together(
    chosen: list[list[int]], data: st.DataObject
) -> None:
    tokens = table_of(chosen)
    first = data.draw(st.integers(0, len(tokens) - 1))
    last = data.draw(st.integers(first + 1, len(tokens)))
    for index in (slice(first, last), Index.computed(torch.arange(first, last))):
        part = tokens.take(index)
        assert len(part) == last - first
        assert torch.equal(part.token_ids, part.positions + 7000)
        assert torch.equal(part.slots, 1000 * part.request + part.positions)
        assert torch.equal(part.positions, tokens.positions[first:last])
        assert part.host is not None
        assert part.host.positions.tolist() == part.positions.tolist()
        assert part.host.request.tolist() == part.request.tolist()
