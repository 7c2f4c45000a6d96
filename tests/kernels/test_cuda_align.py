# SPDX-License-Identifier: Apache-2.0
"""The CUDA `align` agrees with the reference to the last bit.

Without a GPU the very code of its threads runs in a loop over host memory; with one, on it.
"""

import dataclasses
import re
import subprocess
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from tests.kernels.align_cases import (
    CASES,
    DTYPES,
    Run,
    assert_agrees,
    assert_same,
    copy_of,
    good_call,
    hnd,
    make_cache,
    make_loads,
    make_moves,
    make_region,
    nhd,
    pairs_of,
    parts_of,
    shape_of,
    to_device,
)
from tests.kernels.native import KERNELS, compile_cuda, compile_host, compile_ptx
from vllm_segreuse.kernels import cuda, reference, scratch
from vllm_segreuse.kernels.pages import Rotation

SOURCE = KERNELS / "cuda" / "align.cu"


@pytest.fixture(scope="module")
def host_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the library with its threads in a loop."""
    path: Path = tmp_path_factory.mktemp("host") / "align.so"
    compile_host(SOURCE, path)
    return path


@pytest.fixture(scope="module")
def host(host_file: Path) -> CDLL:
    """The library with its threads in a loop."""
    return cuda.open_library(host_file)


@pytest.fixture(params=["host"] if cuda.unavailable() else ["host", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    return {"host": "cpu", "cuda": "cuda"}[request.param]


@pytest.fixture
def run(device: str, request: pytest.FixtureRequest) -> Run:
    if device == "cuda":
        return cuda.align
    library = request.getfixturevalue("host")
    return lambda pages, parts, moves, sources=None: cuda.run(
        library, pages, parts, moves, 0, sources
    )


# Each case with each dtype, apart or overlapping by turns.
SAMPLE = [
    pytest.param(*case.values, (number + index) % 2 == 1, dtype, id=f"{case.id}-{dtype}")
    for number, case in enumerate(CASES)
    for index, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("name", "rotation", "overlapping", "dtype"), SAMPLE)
def test_agrees_with_the_reference(
    run: Run,
    device: str,
    name: str,
    rotation: Rotation | None,
    overlapping: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    shape = shape_of(name)
    parts = parts_of(shape, rotation)
    pages = make_cache(shape.page_elements, 4, dtype, num_layers=2)
    moves = make_moves(4, shape.keys.shape[1], 13, pairs_of(parts), overlapping)
    assert_agrees(run, pages, parts, moves, device)


@pytest.mark.parametrize("start", [16, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("name", "rotation", "overlapping", "dtype"), SAMPLE[::3])
def test_tokens_are_read_elsewhere(
    run: Run,
    device: str,
    name: str,
    rotation: Rotation | None,
    overlapping: bool,
    dtype: torch.dtype,
    start: int,
) -> None:
    """From more rows than there are blocks, whose layers lie side by side."""
    torch.manual_seed(0)
    shape = shape_of(name)
    parts = parts_of(shape, rotation)
    layers = 131 if overlapping and name == "HND 2x80" else 2
    pages = make_cache(shape.page_elements, 3, dtype, layers)
    region = make_region(shape.page_elements, 7, dtype, layers, start)
    moves = make_loads(7, 3, shape.keys.shape[1], 13, pairs_of(parts))
    assert_agrees(run, pages, parts, moves, device, region)


@pytest.mark.parametrize(("start", "gap", "vector_bytes"), [(8, 8, 16), (3, 8, 2), (8, 4, 2)])
def test_what_is_read_elsewhere_may_forbid_wide_vectors(
    host: CDLL, start: int, gap: int, vector_bytes: int
) -> None:
    shape = nhd(3, 16, 32)
    pages = make_cache(shape.page_elements, 3, torch.bfloat16)
    region = make_region(shape.page_elements, 7, torch.bfloat16, 1, start, gap)
    moves = make_loads(7, 3, 16, 4, 16)
    call = cuda.make_call(pages.layers, parts_of(shape, TURNED), moves, region.layers)
    assert host.segreuse_align_vector_bytes(call) == vector_bytes


@pytest.mark.parametrize("num_layers", [1, 4, 7, 128, 131])
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 64])
@pytest.mark.parametrize("scratch_layers", [None, 1, 3])
def test_any_number_of_tokens_and_layers(
    run: Run,
    device: str,
    num_layers: int,
    num_tokens: int,
    scratch_layers: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with a scratch for a few layers only."""
    torch.manual_seed(0)
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(32, True))
    if scratch_layers is not None:
        layer_bytes = num_tokens * 2 * 2 * 32 * 2
        monkeypatch.setattr(scratch, "SCRATCH_BYTES", scratch_layers * layer_bytes + 1)
    pages = make_cache(shape.page_elements, 8, torch.bfloat16, num_layers)
    moves = make_moves(8, 16, num_tokens, 16, overlapping=scratch_layers is not None)
    assert_agrees(run, pages, parts, moves, device)


@pytest.mark.parametrize("by", [-17, -1, 1, 16])
def test_a_shift_over_itself_reads_before_it_writes(run: Run, device: str, by: int) -> None:
    torch.manual_seed(0)
    shape = hnd(2, 16, 64)
    parts = parts_of(shape, Rotation(64, True))
    pages = make_cache(shape.page_elements, 8, torch.float16, num_layers=3)
    moves = make_moves(8, 16, 80, 32, overlapping=True)
    sources = torch.arange(20, 100)
    moves = dataclasses.replace(moves, sources=sources, targets=sources + by)
    assert_agrees(run, pages, parts, moves, device)


WIDE = {
    "NHD 8x128": (16, 16, 16),
    "HND 8x128": (16, 16, 16),
    "HND 2x80": (16, 16, 16),
    "NHD 3x36": (16, 2, 1),
    "NHD 3x72": (16, 16, 1),
    "NHD 40x128": (16, 16, 16),
    "channel tiles": (16, 16, 16),
    "MLA 512+64": (16, 16, 16),
    "NHD": (16, 16, 16),
    "K beside V": (16, 16, 16),
    "K and V interleaved": (4, 2, 1),
    "tiled by 32": (4, 2, 1),
    "pairs": (4, 2, 1),
}


@pytest.mark.parametrize("name", WIDE)
def test_vectors_are_as_wide_as_the_layout_allows(host: CDLL, name: str) -> None:
    """16 bytes where heads and strides are multiples of that, otherwise one element."""
    shape = shape_of(name)
    for dtype, expected in zip(DTYPES[::2], WIDE[name], strict=True):
        pages = make_cache(shape.page_elements, 2, dtype)
        call = cuda.make_call(pages.layers, parts_of(shape, None), make_moves(2, 8, 1, 4, False))
        assert host.segreuse_align_vector_bytes(call) == expected


@dataclasses.dataclass(frozen=True)
class Placement:
    """What may forbid wide vectors, and the size of those that a call then takes."""

    rotation: Rotation
    start: int = 16
    gap: int = 16
    table_start: int = 0
    vector_bytes: int = 2


TURNED = Rotation(32, True)
PLACEMENTS = {
    "as it should be": Placement(TURNED, vector_bytes=16),
    "page address": Placement(TURNED, start=12),
    "page stride": Placement(TURNED, gap=4),
    "table address": Placement(TURNED, table_start=1),
    "first channel": Placement(Rotation(16, True, 4)),
    "half of a neox rotation": Placement(Rotation(24, True)),
    "interleaved rotation of as many": Placement(Rotation(24, False), vector_bytes=16),
    "interleaved rotation": Placement(Rotation(12, False)),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_is_not_aligned_is_moved_by_elements(
    run: Run, device: str, host: CDLL, name: str
) -> None:
    torch.manual_seed(0)
    how = PLACEMENTS[name]
    shape = nhd(3, 16, 32)
    parts = parts_of(shape, how.rotation)
    pages = make_cache(shape.page_elements, 6, torch.bfloat16, 2, how.gap, how.start)
    moves = make_moves(6, 16, 40, pairs_of(parts), overlapping=False)
    cos = torch.cat([torch.zeros(how.table_start), moves.cos.flatten()])[how.table_start :]
    moves = dataclasses.replace(moves, cos=cos.view_as(moves.cos))
    call = cuda.make_call(pages.layers, parts, moves)
    assert host.segreuse_align_vector_bytes(call) == how.vector_bytes
    assert_agrees(run, pages, parts, moves, device)


def test_tables_are_not_read_where_nothing_turns(run: Run, device: str) -> None:
    torch.manual_seed(0)
    shape = nhd(2, 16, 32)
    pages = make_cache(shape.page_elements, 4, torch.float8_e4m3fn)
    moves = make_moves(4, 16, 20, 0, overlapping=False)
    moves = dataclasses.replace(moves, angles=torch.full((20,), 1 << 40))
    mine = copy_of(pages, device)
    run(mine.layers, parts_of(shape, None), to_device(moves, device))
    to = mine.layers[0].cpu().view(torch.uint8)[moves.targets // 16]
    source = pages.layers[0].view(torch.uint8)[moves.sources // 16]
    for i in range(20):
        at = [int(slots[i]) % 16 * 64 for slots in (moves.targets, moves.sources)]
        assert torch.equal(to[i, at[0] : at[0] + 64], source[i, at[1] : at[1] + 64])


def test_offsets_beyond_32_bits_are_reached(run: Run, device: str) -> None:
    """Two pages, more than 4 GiB apart; what is between them is never touched, so never there."""
    torch.manual_seed(0)
    shape = nhd(2, 16, 32)
    parts = parts_of(shape, Rotation(32, True))
    moves = make_moves(2, 16, 16, 16, overlapping=False)
    near = make_cache(shape.page_elements, 2, torch.float8_e4m3fn).layers[0]
    stride = (1 << 32) + 16
    memory = torch.empty(stride + shape.page_elements, dtype=torch.uint8, device=device)
    far = memory.view(near.dtype).as_strided(near.shape, (stride, 1))
    for layer, other in zip(far, near, strict=True):
        layer.copy_(other)
    run([far], parts, to_device(moves, device))
    reference.align([near], parts, moves)
    assert_same(far[1].cpu(), near[1])


@pytest.mark.parametrize("overlapping", [False, True])
def test_nothing_to_move_changes_nothing(run: Run, device: str, overlapping: bool) -> None:
    shape = nhd(2, 16, 32)
    pages = make_cache(shape.page_elements, 4, torch.float16)
    before = pages.memory.clone()
    moves = make_moves(4, 16, 0, 16, overlapping)
    mine = copy_of(pages, device)
    run(mine.layers, parts_of(shape, Rotation(32, True)), to_device(moves, device))
    run([], parts_of(shape, Rotation(32, True)), to_device(moves, device))
    assert torch.equal(mine.memory.cpu(), before)


def test_pages_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    pages, parts, moves = good_call()
    with pytest.raises(ValueError, match="pages are on cpu; the CUDA kernels need them on a GPU"):
        cuda.align(pages, parts, moves)
    cuda.align([], parts, moves)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unavailable", lambda: "there is no GPU")
    with pytest.raises(RuntimeError, match="cannot run: there is no GPU"):
        cuda.align(*good_call())


def test_libraries_of_other_sources_are_refused(
    tmp_path: Path, host_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.cpp").write_text("")
    compile_host(tmp_path / "other.cpp", tmp_path / "other.so")
    with pytest.raises(RuntimeError, match="not a build of kernels/cuda"):
        cuda.open_library(tmp_path / "other.so")
    monkeypatch.setattr(cuda.ctypes, "sizeof", lambda _: 1)
    with pytest.raises(RuntimeError, match="this version passes 1"):
        cuda.open_library(host_file)


# nvcc takes 10 seconds for every architecture: quick runs test the same code on the host, and PTX.
@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library for GPUs, and what the assembler says about its kernels."""
    path: Path = tmp_path_factory.mktemp("cuda") / "_cuda.so"
    return path, compile_cuda(SOURCE, path)


@pytest.mark.slow
def test_kernels_keep_everything_in_registers(built: tuple[Path, str]) -> None:
    """On every architecture; an array that is not unrolled would be kept in memory."""
    report = built[1]
    assert set(re.findall(r"for 'sm_(\d+)'", report)) == {"80", "89", "90"}
    kernels = len(re.findall("Compiling entry function", report))
    assert kernels == 3 * 2 * len(DTYPES)
    assert report.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == kernels


def test_threads_load_all_before_they_store(tmp_path: Path) -> None:
    """Two vectors of 16 bytes in each of four layers, of every format, all on their way at once."""
    kernels = compile_ptx(SOURCE, tmp_path / "align.ptx").split(".visible .entry ")[1:]
    wide = [body for body in kernels if "Li16EEE" in body.split("(")[0]]
    assert len(wide) == len(DTYPES)
    for body in wide:
        loads = [m.start() for m in re.finditer(r"ld\.global\.cs\.v4\.u32", body)]
        stores = [m.start() for m in re.finditer(r"st\.global\.v4\.u32", body)]
        assert (len(loads), len(stores)) == (8, 8)
        assert max(loads) < min(stores)
    # And products are rounded before they are added, as in torch.
    assert not [body for body in kernels if re.search(r"\bfma\.rn\.f32", body)]


@pytest.mark.slow
def test_only_the_interface_is_exported(built: tuple[Path, str]) -> None:
    command = ("nm", "-D", "--defined-only", str(built[0]))
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {
        "segreuse_align",
        "segreuse_align_call_bytes",
        "segreuse_align_scratch_bytes",
        "segreuse_align_vector_bytes",
        "segreuse_message",
        "segreuse_status",
    }


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to launch on")
def test_a_failed_launch_is_reported(
    built: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    library = cuda.open_library(built[0])
    assert library.segreuse_status() != 0
    with pytest.raises(RuntimeError, match=r"9 tokens in 3 layers failed: .+ \(CUDA error \d+\)"):
        cuda.run(library, *good_call(), 0)


class Library:
    """Of a status that its GPU gives it."""

    def __init__(self, status: int) -> None:
        self.segreuse_status = lambda: status
        self.segreuse_message = lambda number: f"fault {number}".encode()


@pytest.mark.parametrize(
    ("version", "is_available", "status", "why"),
    [
        ("12.8", True, 0, None),
        (None, True, 0, "torch sees no CUDA device"),
        ("12.8", False, 0, "torch sees no CUDA device"),
        ("12.8", True, 9, "their build does not suit this GPU: fault 9 (CUDA error 9)"),
    ],
)
def test_the_kernels_run_where_torch_and_the_build_have_a_gpu(
    version: str | None,
    is_available: bool,
    status: int,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    started: list[bool] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(True))
    monkeypatch.setattr(cuda, "_library", lambda: Library(status))
    assert cuda.unavailable.__wrapped__() == why
    assert bool(started) == (version is not None and is_available), "before the kernels are asked"


def test_a_build_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "__file__", "/nowhere/cuda.py")
    with pytest.raises(RuntimeError, match=r"^no _cuda\*.so in /nowhere: the package was built"):
        cuda._library.__wrapped__()


def test_a_launch_that_fails_is_told() -> None:
    library = Library(7)
    library.segreuse_align = lambda *_: 7  # type: ignore[attr-defined]
    pages, parts, moves = good_call()
    with pytest.raises(
        RuntimeError, match=r"^aligning 9 tokens in 3 layers failed: fault 7 \(CUDA error 7\)$"
    ):
        cuda.run(library, pages, parts, moves, 0)  # type: ignore[arg-type]
    cuda.run(library, [], parts, moves, 0)  # type: ignore[arg-type]
    nothing = make_moves(4, 16, 0, 16, True)
    cuda.run(library, pages, parts, nothing, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_layers", "layer_bytes", "together"),
    [
        (1000, 1 << 20, 256),
        (255, 1 << 20, 255),
        (9, 64 << 20, 4),
        (9, (64 << 20) + 1, 3),
        (9, 1 << 40, 1),  # a layer at least
    ],
)
def test_256_mib_of_layers_are_staged_at_a_time(
    num_layers: int, layer_bytes: int, together: int
) -> None:
    assert scratch.layers_at_once(num_layers, layer_bytes) == together
