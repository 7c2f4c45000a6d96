# SPDX-License-Identifier: Apache-2.0
"""How the Triton kernels divide their work. Runs without a GPU: the schedule is plain torch."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.align_cases import nhd

pytest.importorskip("triton", reason="triton is not installed")

from vllm_segreuse.kernels import triton_attention, triton_schedule
from vllm_segreuse.kernels.pages import PageLayout
from vllm_segreuse.kernels.triton_schedule import (
    Tuning,
    attention_tuning,
    default_tuning,
    plan,
    plan_with_flash,
)


@settings(max_examples=40)
@given(
    st.lists(st.sets(st.integers(0, 300), max_size=40), min_size=1, max_size=6).filter(any),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([16, 64]),
)
def test_tiles_are_the_queries_of_one_request_each(
    places: list[set[int]], group: int, rows: int
) -> None:
    """Every query in one of them, in full tiles but for a request's last; most keys first."""
    counts = torch.tensor([len(chosen) for chosen in places])
    request = torch.repeat_interleave(torch.arange(len(places)), counts)
    positions = torch.tensor([p for chosen in places for p in sorted(chosen)], dtype=torch.int64)
    query = torch.empty(len(positions), 2 * group, 32)
    tables = torch.zeros(len(places), 20, dtype=torch.int32)
    where = tables, request, positions
    schedule = plan(query, nhd(2, 16, 32).keys, *where, tuning=Tuning(rows, 16, 4, 2))
    covered, ends, full = [], [], 0
    for first, count, row, done, place in schedule.tiles.tolist():
        assert (done, place) == (0, 0)
        assert 0 <= count <= rows // group
        assert request[first : first + count].eq(row).all()
        covered += range(first, first + count)
        ends += [int(positions[first + count - 1])] if count else []
        full += count == rows // group
    assert sorted(covered) == list(range(len(positions)))
    assert ends == sorted(ends, reverse=True)
    assert full == int((counts // (rows // group)).sum())
    assert (schedule.queries, schedule.group, schedule.splits) == (len(positions), group, 1)
    assert schedule.common is None


@settings(max_examples=40)
@given(
    st.lists(st.sets(st.integers(0, 300), max_size=40), min_size=1, max_size=6).filter(any),
    st.sampled_from([1, 3]),
)
def test_common_keys_are_whole_steps_that_all_queries_of_a_tile_see(
    places: list[set[int]], group: int
) -> None:
    """And as many of them as there are; their rows are the tiles, one after the other."""
    counts = torch.tensor([len(chosen) for chosen in places])
    request = torch.repeat_interleave(torch.arange(len(places)), counts)
    positions = torch.tensor([p for chosen in places for p in sorted(chosen)], dtype=torch.int64)
    query = torch.empty(len(positions), 2 * group, 32)
    tables = torch.arange(len(places) * 20, dtype=torch.int32).view(-1, 20)
    where = tables, request, positions
    tuning = Tuning(16, 32, 4, 2)
    schedule = plan_with_flash(query, nhd(2, 16, 32).keys, *where, tuning=tuning, common_tiles=0)
    common = schedule.common
    assert common is not None
    assert (common.most_queries, common.most_keys) == (16 // group, 320)
    assert common.bounds[0] == 0
    assert common.bounds[-1] == len(positions)
    assert sorted(common.order.tolist()) == list(range(len(positions)))
    tiles = min(len(positions), len(positions) // (16 // group) + len(places))
    widest = 3 * (320 * len(places) // tiles)
    for tile, (first, count, row, done, place) in enumerate(schedule.tiles.tolist()):
        assert request[first : first + count].eq(row).all()
        if count:
            assert positions[first + count - 1] - positions[first] <= widest
        assert common.lengths[tile] == done
        assert common.bounds[tile : tile + 2].tolist() == [place, place + count]
        assert common.order[place : place + count].tolist() == list(range(first, first + count))
        if count:
            assert done % 32 == 0
            assert 0 <= int(positions[first]) + 1 - done < 32
            assert torch.equal(common.block_tables[tile], tables[row])


def test_a_tile_is_cut_only_if_it_spans_much_of_the_context() -> None:
    """Then where the context is, into parts of the same size; a program attends to one of them."""
    keys, tuning = nhd(1, 16, 32).keys, Tuning(16, 16, 4, 2)
    tables = torch.zeros(1, 64, dtype=torch.int32)

    def spans(positions: list[int]) -> list[list[int]]:
        where = tables, torch.zeros(len(positions), dtype=torch.int64), torch.tensor(positions)
        schedule = plan_with_flash(torch.empty(len(positions), 2, 32), keys, *where, tuning=tuning)
        assert schedule.common is not None
        tiles = sorted(schedule.tiles.tolist())
        return [positions[first : first + count] for first, count, *_ in tiles if count]

    even = list(range(0, 1024, 4))
    assert [len(span) for span in spans(even)] == [8] * 32
    # 17 of them have 60 positions each; parts are of 180.
    wide = [*range(124), 300, 500, 510, 1000]
    expected = [[*range(i, i + 8)] for i in range(0, 120, 8)]
    assert spans(wide) == [*expected, [120, 121, 122, 123], [300], [500, 510], [1000]]


def test_only_many_queries_have_keys_in_common_that_count() -> None:
    """Sixteen full tiles of each request, and no window, which moves from query to query."""
    tables = torch.zeros(2, 64, dtype=torch.int32)
    keys, tuning = nhd(1, 16, 32).keys, Tuning(16, 16, 4, 2)

    def shared(queries: int, **more: Any) -> bool:
        request = torch.arange(queries) * 2 // queries
        where = tables, request, torch.arange(queries)
        query = torch.empty(queries, 2, 32)
        return plan_with_flash(query, keys, *where, tuning=tuning, **more).common is not None

    assert [shared(queries) for queries in (255, 256, 900)] == [False, True, True]
    assert not shared(900, window=2000)
    assert not shared(900, flash=False)
    assert not shared(900, common_tiles=60)


def test_splits_divide_what_is_left_behind_common_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(triton_schedule, "splits_to_fill", lambda _, keys, *__: asked.append(keys))
    tables = torch.zeros(2, 1024, dtype=torch.int32)
    where = tables, torch.arange(320) // 160, torch.arange(320)
    for flash in (False, True):
        query, tuning = torch.empty(320, 2, 32), Tuning(16, 16, 4, 2)
        plan(query, nhd(1, 16, 32).keys, *where, flash=flash, tuning=tuning)
    assert asked == [16384, 16384 * 2 // 42]


@pytest.mark.parametrize(
    ("dtype", "head_size", "queries", "group", "expected"),
    [
        (torch.bfloat16, 128, 64, 4, Tuning(128, 64, 8, 3)),
        (torch.bfloat16, 128, 1, 4, Tuning(16, 64, 4, 3)),
        (torch.bfloat16, 128, 9, 4, Tuning(64, 64, 4, 3)),
        (torch.float16, 256, 64, 4, Tuning(64, 32, 4, 3)),
        (torch.float16, 129, 64, 4, Tuning(64, 32, 4, 3)),
        (torch.float32, 64, 64, 4, Tuning(32, 16, 8, 2)),
        (torch.float32, 64, 1, 2, Tuning(16, 16, 4, 2)),
        (torch.float32, 64, 1, 40, Tuning(64, 16, 8, 2)),  # a group must fit in a tile
        (torch.float16, 256, 1, 100, Tuning(128, 32, 8, 3)),
    ],
)
def test_programs_fit_the_smallest_gpu(
    dtype: torch.dtype, head_size: int, queries: int, group: int, expected: Tuning
) -> None:
    """Sizes that were seen to compile within 99 KiB (test_triton_compiles.py)."""
    assert default_tuning(dtype, head_size, queries, group) == expected


@pytest.mark.parametrize(
    ("dtype", "head_size", "queries", "capability", "ahead"),
    [
        (torch.bfloat16, 128, 64, (9, 0), True),
        (torch.float16, 80, 64, (9, 0), True),
        (torch.bfloat16, 128, 64, (8, 0), False),  # not measured
        (torch.bfloat16, 128, 64, (10, 0), False),  # not measured
        (torch.bfloat16, 64, 64, (9, 0), False),  # not measured
        (torch.bfloat16, 128, 9, (9, 0), False),
        (torch.float32, 128, 64, (9, 0), False),
    ],
)
def test_on_hopper_keys_are_loaded_two_steps_ahead(
    dtype: torch.dtype, head_size: int, queries: int, capability: tuple[int, int], ahead: bool
) -> None:
    found = attention_tuning(dtype, head_size, queries, 4, capability)
    usual = default_tuning(dtype, head_size, queries, 4)
    sizes = {"stages": 5, "resident": 1} if ahead else {}
    assert found == dataclasses.replace(usual, **sizes)


@pytest.mark.parametrize(
    ("programs", "keys", "resident", "splits"),
    [
        (216, 1 << 16, 2, 1),  # two for each multiprocessor
        (215, 1 << 16, 2, 2),  # twice 108 programs, at least
        (215, 1 << 16, 1, 1),
        (8, 1 << 16, 2, 27),
        (1, 1 << 16, 2, 32),  # not more
        (8, 1024, 2, 4),  # 256 keys each
        (8, 100, 2, 1),
        (0, 1024, 2, 4),
    ],
)
def test_keys_are_split_to_fill_the_gpu(
    programs: int, keys: int, resident: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a100 = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: a100)
    assert triton_schedule.splits_to_fill(programs, keys, torch.device("cuda"), resident) == splits
    assert triton_schedule.splits_to_fill(programs, keys, torch.device("cpu"), resident) == 1


def test_heads_that_cannot_share_a_tile_are_refused() -> None:
    assert triton_schedule.heads_per_kv_head(128, 1) == 128
    for heads, kv_heads in ((129, 1), (3, 2), (258, 2)):
        with pytest.raises(ValueError, match=f"{heads} query heads over {kv_heads} KV heads"):
            triton_schedule.heads_per_kv_head(heads, kv_heads)
    where = torch.zeros(1, 1).int(), torch.zeros(1).long(), torch.zeros(1).long()
    with pytest.raises(ValueError, match="tiles of 16 rows cannot hold 17 heads"):
        plan(torch.empty(1, 17, 32), nhd(1, 16, 32).keys, *where, tuning=Tuning(16, 16, 4, 2))


def test_heads_of_16_to_256_channels_are_taken() -> None:
    """As `supports` says."""
    table = torch.zeros(1, 3, dtype=torch.int32)
    for channels, fits in ((15, False), (16, True), (256, True), (257, False)):
        shape = nhd(2, 16, channels)
        given = torch.zeros(2, 4, channels), torch.zeros(3, shape.page_elements), shape.keys, table
        layout = PageLayout(shape.keys, shape.values)
        assert triton_attention.supports(layout, torch.float32) == fits
        if fits:
            triton_attention.check_inputs(*given, 1.0)
        else:
            with pytest.raises(ValueError, match=f"keys have {channels} channels; expected 16 to"):
                triton_attention.check_inputs(*given, 1.0)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    """The largest logit is that of the largest product."""
    query, pages = torch.zeros(2, 4, 32), torch.zeros(3, nhd(2, 16, 32).page_elements)
    table = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"scale is {scale}; expected more than 0"):
        triton_attention.check_inputs(query, pages, nhd(2, 16, 32).keys, table, scale)
