# SPDX-License-Identifier: Apache-2.0
"""Blocks reach their rows, and rows the pages that are read, byte for byte; on a GPU nothing uses
staging before whoever had it is done."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.features.tier.staging import StagedMover
from vllm_segreuse.kernels import reference
from vllm_segreuse.model.cells import StoredPage, views
from vllm_segreuse.plan import IntArray
from vllm_segreuse.prefill.mover import CopyBlocks, InPlace, Mover

BLOCKS, ROWS = 12, 30
ELEMENTS = (24, 40, 24)
CELL_BYTES = 256
CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]


class Streams:
    """Everything runs at once; which stream records and waits for which event is logged. An event
    is known by the length of the log once it was recorded."""

    def __init__(self) -> None:
        self.side = False
        self.log: list[str] = []

    @contextmanager
    def on_side(self) -> Iterator[None]:
        before, self.side = self.side, True
        yield
        self.side = before

    def record(self) -> Any:
        self.log.append(f"record {'side' if self.side else 'compute'}")
        return self.side, len(self.log)

    def wait(self, event: Any) -> None:
        self.log.append(f"{'side' if self.side else 'compute'} waits for {event[1]}")


def pages_of(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(BLOCKS, elements).to(dtype) for elements in ELEMENTS]


def stored_as(pages: list[torch.Tensor]) -> list[StoredPage]:
    return [StoredPage(layer.shape[1] * layer.element_size(), layer.dtype) for layer in pages]


def region(pages: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    cells = torch.zeros(ROWS, CELL_BYTES, dtype=torch.int8)
    return cells, views(cells, stored_as(pages))


def movers(dtype: torch.dtype, slots: int) -> tuple[list[torch.Tensor], torch.Tensor, list[Mover]]:
    pages = pages_of(dtype)
    cells, views = region(pages)
    copy = copier(pages)
    staged = StagedMover(
        copy, stored_as(pages), CPU, cells, Streams(), staging_bytes=2 * slots * CELL_BYTES
    )
    return pages, cells, [InPlace(copy, views), staged]


def copier(pages: list[torch.Tensor]) -> CopyBlocks:
    def copy(to: Sequence[torch.Tensor], blocks: IntArray, rows: IntArray) -> None:
        source, target = (torch.from_numpy(np.asarray(x, np.int64)) for x in (blocks, rows))
        reference.store(pages, to, source, target)

    return copy


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@given(
    blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=9, unique=True),
    rows=st.permutations(range(ROWS)),
    dtype=st.sampled_from(DTYPES),
    which=st.sampled_from([0, 1]),
    slots=st.integers(1, 4),
)
def test_rows_hold_blocks_and_are_read_as_they_are(
    blocks: list[int], rows: list[int], dtype: torch.dtype, which: int, slots: int
) -> None:
    pages, cells, subjects = movers(dtype, slots)
    subject, rows = subjects[which], rows[: len(blocks)]
    subject.store(np.array(blocks, np.int32), np.array(rows, np.int32))
    untouched = sorted(set(range(ROWS)) - set(rows))
    assert not cells[untouched].any()
    found: list[int] = []
    for first, stop, loaded, places in subject.load(np.array(rows, np.int32)):
        for row, slot in zip(range(first, stop), places.tolist(), strict=True):
            for layer, read in zip(pages, loaded, strict=True):
                assert torch.equal(as_bytes(read[slot]), as_bytes(layer[blocks[row]]))
        found += range(first, stop)
    assert found == list(range(len(rows)))


def test_on_a_cpu_rows_are_read_where_they_lie_and_nothing_is_left_to_wait_for() -> None:
    _, cells, (subject, _) = movers(torch.bfloat16, 1)
    [loaded] = subject.load(np.array([3, 1], np.int32))
    assert loaded.pages[0].untyped_storage().data_ptr() == cells.untyped_storage().data_ptr()
    assert loaded.slots.tolist() == [3, 1]
    assert subject.mark() is None


@pytest.mark.parametrize(
    ("staging_bytes", "rows", "slots"),
    [
        (2 * 4 * CELL_BYTES, 30, 4),
        (2 * 4 * CELL_BYTES - 1, 30, 3),
        (0, 30, 1),
        (1 << 30, 30, 30),
        (1 << 30, 1, 1),
    ],
)
def test_both_halves_of_staging_have_room_for_as_many_rows(
    staging_bytes: int, rows: int, slots: int
) -> None:
    pages = pages_of(torch.bfloat16)
    cells = torch.zeros(rows, CELL_BYTES, dtype=torch.int8)
    subject = StagedMover(
        copier(pages), stored_as(pages), CPU, cells, Streams(), staging_bytes=staging_bytes
    )
    assert [tuple(half.shape) for half in subject.staging] == [(slots, CELL_BYTES)] * 2


def test_staging_takes_128_mib() -> None:
    pages = pages_of(torch.bfloat16)
    cells = torch.empty(1100, 1 << 16, dtype=torch.int8)
    subject = StagedMover(copier(pages), stored_as(pages), CPU, cells, Streams())
    assert sum(half.nbytes for half in subject.staging) == 128 << 20
    assert not subject.zeroises
    subject.close()
    assert subject.staging == []


def log_of(subject: Any) -> list[str]:
    log, subject.streams.log[:] = list(subject.streams.log), []
    return log


def test_pages_are_copied_on_the_compute_stream_and_rows_behind_that_on_the_side() -> None:
    _, _, (_, subject) = movers(torch.bfloat16, slots=1)
    three = np.arange(3, dtype=np.int32)
    subject.store(three, three)
    assert log_of(subject) == [
        *("record compute", "side waits for 1", "record side"),  # first half
        *("record compute", "side waits for 4", "record side"),  # second half
        # The first again, once its rows are copied.
        *("compute waits for 3", "record compute", "side waits for 8", "record side"),
    ]


def test_what_is_loaded_is_read_once_it_is_there_and_overwritten_once_it_was_read() -> None:
    _, _, (_, subject) = movers(torch.bfloat16, slots=1)
    list(subject.load(np.arange(3, dtype=np.int32)))
    assert log_of(subject) == [
        *("record side", "compute waits for 1", "record compute"),
        *("record side", "compute waits for 4", "record compute"),
        *("side waits for 3", "record side", "compute waits for 8", "record compute"),
    ]


def test_staging_is_free_once_its_last_use_is_over_also_in_the_other_direction() -> None:
    _, _, (_, subject) = movers(torch.bfloat16, slots=2)
    two = np.arange(2, dtype=np.int32)
    subject.store(two, two)
    list(subject.load(two))
    log_of(subject)
    subject.store(two, two)
    assert log_of(subject)[0] == "compute waits for 3", "rows that were stored from there"
    list(subject.load(two))
    assert log_of(subject)[0] == "side waits for 6", "what was read there"


def test_a_mark_is_behind_what_the_side_stream_was_given() -> None:
    _, _, (_, subject) = movers(torch.bfloat16, slots=2)
    mark: Any = subject.mark()
    assert mark[0] is True


def test_staging_holds_a_row_at_least_and_no_more_than_there_are() -> None:
    pages = pages_of(torch.bfloat16)
    cells, _ = region(pages)
    for staging_bytes, slots in ((1, 1), (2 * 3 * CELL_BYTES, 3), (1 << 30, ROWS)):
        subject = StagedMover(copier(pages), stored_as(pages), CPU, cells, Streams(), staging_bytes)
        assert [len(half) for half in subject.staging] == [slots, slots]


def test_a_mover_that_is_closed_holds_nothing_of_the_region() -> None:
    _, cells, both = movers(torch.bfloat16, slots=4)
    region = weakref.ref(cells.untyped_storage())
    for subject in both:
        subject.close()
    del cells
    gc.collect()
    assert region() is None


class Marked:
    """A codec that cannot store some blocks."""

    def __init__(self, pages: list[torch.Tensor], without_code: set[int]) -> None:
        self._copy, self._without_code = copier(pages), without_code

    def __call__(
        self, to: Sequence[torch.Tensor], blocks: IntArray, rows: IntArray
    ) -> torch.Tensor:
        self._copy(to, blocks, rows)
        return torch.tensor([int(block) not in self._without_code for block in blocks])


def test_what_the_codec_cannot_store_is_told_across_chunks() -> None:
    pages = pages_of(torch.bfloat16)
    cells, rows = region(pages)
    copy = Marked(pages, {1, 4})
    known = (stored_as(pages), CPU, cells, Streams())
    for subject in (InPlace(copy, rows), StagedMover(copy, *known, staging_bytes=4 * CELL_BYTES)):
        encoded = subject.store(np.arange(5, dtype=np.int32), np.arange(5, dtype=np.int32))
        assert encoded is not None
        assert encoded.tolist() == [True, False, True, True, False]
