# SPDX-License-Identifier: Apache-2.0
"""Rows of the attention backend agree with a loop over the active tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from vllm_segreuse.prefill import rows
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
    tokens, expected_rows = table_of(chosen), rows_of(chosen)
    block_tables = torch.arange(len(chosen) * 7, dtype=torch.int32).view(len(chosen), 7)
    common = common_metadata(tokens, block_tables)

    lengths = [row.last - row.first + 1 for row in expected_rows]
    assert common.num_reqs == len(expected_rows)
    assert common.num_actual_tokens == len(tokens) == sum(lengths)
    assert common.query_start_loc.tolist() == np.cumsum([0, *lengths]).tolist()
    assert common.query_start_loc_cpu.tolist() == common.query_start_loc.tolist()
    assert common.seq_lens.tolist() == [row.last + 1 for row in expected_rows]
    assert common.max_query_len == max(lengths)
    assert common.max_seq_len == max(row.last + 1 for row in expected_rows)
    expected = torch.stack([block_tables[row.request] for row in expected_rows])
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


@pytest.fixture
def forward_contexts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict]]:
    """vLLM's forward contexts that were entered, with an entry when they are left."""
    entered: list[tuple[tuple[Any, ...], dict]] = []
    current = SimpleNamespace(all_moe_layers=["a layer"])

    @contextmanager
    def context(*args: Any, **options: Any) -> Iterator[None]:
        entered.append((args, options))
        yield
        assert current.all_moe_layers is None, "experts must not be told apart by counting calls"
        entered.append(((), {}))

    monkeypatch.setattr(rows, "set_forward_context", context)
    monkeypatch.setattr(rows, "get_forward_context", lambda: current)
    return entered


class Builder:
    """A backend's metadata builder."""

    reorder_batch_threshold: int | None = None

    def build(self, prefix_len: int, common: Any) -> tuple[int, Any]:
        return prefix_len, common


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> rows.RowBuilder:
    """For at most two rows."""
    asked: list[Any] = []

    def private_builder(*args: Any) -> Builder:
        asked.append(args)
        return Builder()

    monkeypatch.setattr(rows, "private_builder", private_builder)
    config: Any = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))
    attention: Any = {name: Attention() for name in "ab"}
    made = rows.RowBuilder(config, attention, {"a": "spec", "b": "spec"}, 2)
    assert asked == [(Backend, "spec", ["a", "b"], config, 2, torch.device("cpu"))]
    return made


class Backend:
    """vLLM's attention backend of layers."""

    @staticmethod
    def full_cls_name() -> str:
        return "backend"


class OtherBackend(Backend):
    @staticmethod
    def full_cls_name() -> str:
        return "other"


class Attention:
    """vLLM's attention layer."""

    def __init__(self, backend: Any = Backend, num_heads: int = 4) -> None:
        self.get_attn_backend, self.num_heads = lambda: backend, num_heads


def test_layers_are_grouped_as_the_runner_groups_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One builder for equal backends, specs and numbers of heads; each has its own metadata."""
    groups = []

    def private_builder(backend: Any, spec: str, names: list[str], *_: Any) -> Builder:
        groups.append((backend.full_cls_name(), spec, names))
        return Builder()

    monkeypatch.setattr(rows, "private_builder", private_builder)
    config: Any = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))
    attention: Any = {
        "a": Attention(),
        "b": Attention(),
        "c": Attention(),
        "d": Attention(num_heads=8),
        "e": Attention(OtherBackend),
    }
    specs = {"a": "narrow", "b": "wide", "c": "narrow", "d": "narrow", "e": "narrow"}
    made = rows.RowBuilder(config, attention, specs, 2)
    assert groups == [
        ("backend", "narrow", ["a", "c"]),
        ("backend", "wide", ["b"]),
        ("backend", "narrow", ["d"]),
        ("other", "narrow", ["e"]),
    ]
    metadata = made.metadata(table_of([[3, 4]]), torch.zeros(1, 7, dtype=torch.int32))
    assert set(metadata) == set("abcde")
    assert metadata["a"] is metadata["c"]
    assert len({id(of_layer) for of_layer in metadata.values()}) == 4


@pytest.mark.parametrize(
    ("execution", "count", "mode"),
    [
        (rows.EAGER, 3, CUDAGraphMode.NONE),
        (rows.Execution(compiled=True), 3, CUDAGraphMode.NONE),
        (rows.Execution(compiled=True, graph_tokens=3), 3, CUDAGraphMode.PIECEWISE),
        (rows.Execution(compiled=True, graph_tokens=8), 8, CUDAGraphMode.PIECEWISE),
    ],
)
def test_all_layers_attend_by_one_metadata_and_write_to_the_tokens_slots(
    builder: rows.RowBuilder,
    forward_contexts: list,
    execution: rows.Execution,
    count: int,
    mode: CUDAGraphMode,
) -> None:
    tokens = table_of([[3, 4], [8]])
    tables = torch.arange(14, dtype=torch.int32).view(2, 7)
    with builder.forward_context(tokens, tables, execution):
        pass
    [((metadata, config), options), _] = forward_contexts
    assert config is builder.vllm_config
    assert metadata["a"] is metadata["b"]
    prefix_len, common = metadata["a"]
    assert (prefix_len, common.seq_lens.tolist()) == (0, [5, 9])
    slots = options.pop("slot_mapping")
    padding = [-1] * (count - 3)
    assert [slots[name].tolist() for name in ("a", "b")] == [[3, 4, 1008, *padding]] * 2
    assert common.num_actual_tokens == 3, "backends attend by the tokens there are"
    assert options == {
        "num_tokens": count,
        "skip_compiled": not execution.compiled,
        "cudagraph_runtime_mode": mode,
        "batch_descriptor": BatchDescriptor(count) if execution.graph_tokens else None,
    }


def test_the_pass_is_eager_unless_it_may_be_compiled(
    builder: rows.RowBuilder, forward_contexts: list
) -> None:
    with builder.forward_context(table_of([[3]]), torch.zeros(1, 7, dtype=torch.int32)):
        pass
    assert forward_contexts[0][1]["skip_compiled"] is True


def test_more_rows_than_there_is_room_for_are_refused(
    builder: rows.RowBuilder, forward_contexts: list
) -> None:
    tables = torch.zeros(2, 7, dtype=torch.int32)
    with builder.forward_context(table_of([[3, 4, 5], [8]]), tables):
        pass
    too_many = table_of([[3, 5], [8, 9]])
    with (
        pytest.raises(ValueError, match=r"4 active tokens are 3 rows; the pass has room for 2"),
        builder.forward_context(too_many, tables),
    ):
        pass
