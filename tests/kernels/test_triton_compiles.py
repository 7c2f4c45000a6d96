# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for Ampere and Hopper without a GPU: the interpreter forgives what
the compiler does not. What they compile to fits the GPU and uses its wide paths."""

import dataclasses
import re
from typing import Any

import pytest
import torch

from tests.kernels.align_cases import (
    DTYPES,
    Shape,
    hnd,
    make_cache,
    make_moves,
    mla,
    nhd,
    parts_of,
)
from tests.kernels.carry_cases import ROWS, before_of, carried_of
from tests.kernels.triton_running import INTERPRETING
from vllm_segreuse.kernels.pages import Rotation

if INTERPRETING:
    pytest.skip("the interpreter is on, nothing is compiled", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
triton_compiling = pytest.importorskip("tests.kernels.triton_compiling")
if not triton_compiling.can_compile():
    pytest.skip("triton has no NVIDIA backend or no ptxas here", allow_module_level=True)

from vllm_segreuse.kernels import (  # noqa: E402
    flash_attention,
    triton_align,
    triton_attention,
    triton_carry,
    triton_schedule,
    triton_scores,
)

KIB = 1024
SHARED_BYTES = {80: 99 * KIB, 90: 227 * KIB}  # the former of sm_86 and sm_89, which run such code
# Compiling takes seconds where nothing is cached: one architecture, and no attention, are enough
# for a quick run, since the interpreter runs them all.
BOTH = pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.slow), 90], ids=["sm_80", "sm_90"]
)


class Kernels:
    """All kernels replaced by their compilation for one architecture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
        self._by_name: dict[str, Any] = {}
        for module, name in (
            (triton_align, "_move"),
            (triton_carry, "_carry"),
            (triton_attention, "_attend"),
            (triton_attention, "_join"),
            (triton_scores, "_row_sums"),
            (triton_scores, "_join_sums"),
            (triton_scores, "_columns"),
        ):
            compiled = triton_compiling.Compiled(getattr(module, name), arch)
            monkeypatch.setattr(module, name, compiled)
            self._by_name[name] = compiled

    def launches(self, name: str) -> list[Any]:
        return self._by_name[name].results

    def variants(self, name: str) -> int:
        return len(self._by_name[name].variants)


@pytest.fixture
def kernels(arch: int, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch, arch)


def widths(ptx: str, what: str) -> set[str]:
    """Of accesses to global memory, as PTX writes them: `v4.b32` is 16 bytes."""
    return set(re.findall(rf"\b{what}\.global\.(\S+)", ptx))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_align_moves_16_bytes_at_a_time(kernels: Kernels, dtype: torch.dtype, neox: bool) -> None:
    shape = nhd(8, 16, 128)
    pages = make_cache(shape.page_elements, 4, dtype, num_layers=2)
    for overlapping in (False, True):
        moves = make_moves(4, 16, 20, 64, overlapping)
        triton_align.align(pages.layers, parts_of(shape, Rotation(128, neox)), moves)
    launches = kernels.launches("_move")
    assert len(launches) == 1 + 2
    for compiled in launches:
        assert widths(compiled.asm["ptx"], "st") == {"v4.b32"}
        assert compiled.metadata.shared <= 4 * KIB
        assert "fma" not in compiled.asm["ptx"]


@BOTH
def test_align_of_pages_that_are_not_aligned_is_not_wide(kernels: Kernels) -> None:
    """A wide access to an address that is not a multiple of its width would fail."""
    shape = nhd(8, 16, 128)
    parts = parts_of(shape, Rotation(64, True))
    for gap, start in ((16, 3), (3, 16)):
        pages = make_cache(shape.page_elements, 4, torch.bfloat16, 1, gap, start)
        triton_align.align(pages.layers, parts, make_moves(4, 16, 20, 32, False))
    for compiled in kernels.launches("_move"):
        assert widths(compiled.asm["ptx"], "st") == {"b16"}


@BOTH
def test_align_of_latents(kernels: Kernels) -> None:
    shape = mla(512, 64)
    pages = make_cache(shape.page_elements, 4, torch.bfloat16, num_layers=2)
    rotated = parts_of(shape, Rotation(64, False))
    triton_align.align(pages.layers, rotated, make_moves(4, 16, 20, 32, False))
    assert widths(kernels.launches("_move")[0].asm["ptx"], "st") == {"v4.b32"}


def compile_carry(shape: Shape, rotation: Rotation, dtype: torch.dtype, start: int = 16) -> None:
    pages = make_cache(shape.page_elements, 24, dtype, start=start).layers[0]
    parts = parts_of(shape, rotation)
    carried = carried_of([(0, 30, 1)], rotation.dim // 2)
    triton_carry.carry(pages, parts, before_of(parts, dtype), carried)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_carry_writes_16_bytes_at_a_time(kernels: Kernels, dtype: torch.dtype, neox: bool) -> None:
    compile_carry(nhd(8, 16, 128), Rotation(128, neox), dtype)
    [compiled] = kernels.launches("_carry")
    assert widths(compiled.asm["ptx"], "st") == {"v4.b32"}
    assert "fma" not in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 4 * KIB


@BOTH
def test_carry_in_pages_that_are_not_aligned_is_not_wide(kernels: Kernels) -> None:
    compile_carry(nhd(8, 16, 128), Rotation(64, True), torch.bfloat16, start=3)
    [compiled] = kernels.launches("_carry")
    assert widths(compiled.asm["ptx"], "st") == {"b16"}


@BOTH
def test_one_compilation_of_carry_serves_every_pass_and_chunk(kernels: Kernels) -> None:
    shape = nhd(8, 16, 128)
    parts = parts_of(shape, Rotation(128, True))
    pages = make_cache(shape.page_elements, 24, torch.bfloat16).layers[0]
    before = before_of(parts, torch.bfloat16)
    for tokens in (1, 16, 37):
        carried = carried_of([(0, tokens, -1)], 64)
        for first in (0, 1, 2):
            chunk = dataclasses.replace(carried, changed=carried.changed[first:ROWS])
            triton_carry.carry(pages, parts, [part[first:] for part in before], chunk)
    assert kernels.variants("_carry") == 1


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("head_size", "dtype", "queries", "splits", "stages"),
    [
        (128, torch.bfloat16, 64, 1, {80: 3, 90: 5}),
        (256, torch.float16, 64, 1, {80: 3, 90: 3}),
        (64, torch.bfloat16, 1, 4, {80: 3, 90: 3}),
        (128, torch.float32, 64, 4, {80: 2, 90: 2}),
    ],
)
def test_attention_and_scores_use_tensor_cores(
    kernels: Kernels,
    arch: int,
    head_size: int,
    dtype: torch.dtype,
    queries: int,
    splits: int,
    stages: dict[int, int],
) -> None:
    shape = hnd(8, 16, head_size)
    pages = torch.zeros(4, shape.page_elements, dtype=dtype)
    query = torch.zeros(queries, 32, head_size, dtype=dtype)
    positions, request = torch.arange(queries), torch.zeros(queries, dtype=torch.int64)
    tables = torch.zeros(1, 40, dtype=torch.int32)
    places = tables, request, positions
    tuning = triton_schedule.attention_tuning(dtype, head_size, queries, 4, (arch // 10, 0))
    assert tuning.stages == stages[arch]
    schedule = triton_schedule.plan(query, shape.keys, *places, splits=splits, tuning=tuning)
    assert shape.values is not None
    triton_attention.sparse_attention(
        query, query, pages, shape.keys, shape.values, *places, 1.0, schedule=schedule
    )
    triton_scores.token_scores(query, positions, pages, shape.keys, tables[0], 600, 1.0)
    assert len(kernels.launches("_join")) == (splits > 1)
    whole_warp_groups = arch == 90 and schedule.tuning.rows >= 64
    for name in ("_attend", "_row_sums", "_columns"):
        [compiled] = kernels.launches(name)
        assert compiled.metadata.shared <= SHARED_BYTES[arch]
        if dtype != torch.float32:
            ptx = compiled.asm["ptx"]
            assert ("wgmma.mma_async" if whole_warp_groups else "mma.sync") in ptx
            # The loads of later steps are under way, 16 bytes at a time.
            assert "cp.async.cg.shared.global" in ptx


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90], ids=["sm_90"])
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_behind_common_keys_uses_tensor_cores(
    kernels: Kernels, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(query), torch.empty(query.shape[1], len(query))

    monkeypatch.setattr(flash_attention, "attend", attend)
    shape, queries = hnd(8, 16, 128), 640
    pages = torch.zeros(4, shape.page_elements, dtype=torch.bfloat16)
    query = torch.zeros(queries, 32, 128, dtype=torch.bfloat16)
    places = (
        torch.zeros(1, 40, dtype=torch.int32),
        torch.zeros(queries, dtype=torch.int64),
        torch.arange(queries),
    )
    tuning = triton_schedule.attention_tuning(torch.bfloat16, 128, queries, 4, (9, 0))
    given = query, shape.keys, *places
    schedule = triton_schedule.plan_with_flash(*given, splits=splits, tuning=tuning)
    assert schedule.common is not None
    assert shape.values is not None
    halves = shape.keys, shape.values
    triton_attention.sparse_attention(query, query, pages, *halves, *places, 1.0, schedule=schedule)
    [compiled] = kernels.launches("_attend")
    assert compiled.metadata.shared <= SHARED_BYTES[90]
    assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_attention_to_fp8_uses_tensor_cores(
    kernels: Kernels, arch: int, stored: torch.dtype
) -> None:
    shape, queries = hnd(8, 16, 128), 64
    pages = torch.zeros(4, shape.page_elements, dtype=stored)
    query = torch.zeros(queries, 32, 128, dtype=torch.bfloat16)
    positions, request = torch.arange(queries), torch.zeros(queries, dtype=torch.int64)
    tables = torch.zeros(1, 40, dtype=torch.int32)
    assert shape.values is not None
    halves, places = (shape.keys, shape.values), (tables, request, positions)
    triton_attention.sparse_attention(query, query, pages, *halves, *places, 1.0, value_scale=0.5)
    triton_scores.token_scores(query, positions, pages, shape.keys, tables[0], 600, 1.0)
    for name in ("_attend", "_row_sums", "_columns"):
        [compiled] = kernels.launches(name)
        assert compiled.metadata.shared <= SHARED_BYTES[arch]
        assert re.search(r"wgmma\.mma_async|mma\.sync", compiled.asm["ptx"])
        assert ".bf16" in compiled.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90], ids=["sm_90"])
def test_one_compilation_serves_every_pass(kernels: Kernels) -> None:
    """A request must not wait for the compiler because it has a token more than the last one."""
    shape = hnd(2, 16, 64)
    parts = parts_of(shape, Rotation(64, True))
    cache = make_cache(shape.page_elements, 8, torch.bfloat16, num_layers=2).layers
    assert shape.values is not None
    for queries, requests, blocks, splits in ((127, 1, 7, 3), (128, 2, 16, 4), (256, 1, 1, 4)):
        triton_align.align(cache, parts, make_moves(8, 16, queries // 4, 32, False))
        query = torch.zeros(queries, 8, 64, dtype=torch.bfloat16)
        tables = torch.zeros(requests, blocks, dtype=torch.int32)
        request = positions = torch.zeros(queries, dtype=torch.int64)
        places = tables, request, positions
        schedule = triton_schedule.plan(query, shape.keys, *places, splits=splits)
        keys, values = shape.keys, shape.values
        triton_attention.sparse_attention(
            query, query, cache[0], keys, values, *places, 1.0, schedule=schedule
        )
        inputs = query, positions, cache[0], keys, tables[0], 16 * blocks
        for highest in (False, True):
            triton_scores.token_scores(*inputs, 1.0, highest, splits=splits)
        triton_scores.token_scores(*inputs, 1.0, splits=splits, last=4 * splits)
    for name in ("_move", "_attend", "_join", "_row_sums", "_join_sums"):
        assert kernels.variants(name) == 1, name
    assert kernels.variants("_columns") == 3, "sums, peaks, and two sums"
