# SPDX-License-Identifier: Apache-2.0
"""The kernels in C++ for CPUs (kernels/cpu/), called through their C interface.

The library knows nothing of torch: it is built once, for any torch version, wherever there is a C++
compiler. `cpu_structures.py` has the arguments of its functions, `cpu_store.py` the functions that
write to a host region.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_segreuse.kernels.arguments import (
    check_blocks,
    check_carried,
    check_encoded,
    check_last,
    check_moves,
    check_pages,
    check_parts,
    check_places,
    check_positions,
    check_queries,
    check_sources,
    check_strides,
    check_tables,
    check_tensor,
    check_weights,
    fit,
)
from vllm_segreuse.kernels.codecs import Codec, EncodedPage
from vllm_segreuse.kernels.cpu_structures import (
    CODECS,
    DTYPES,
    STRUCTURES,
    AlignArgs,
    AttentionArgs,
    CarryArgs,
    PartArgs,
    ScoreArgs,
    Strides,
    Weights,
)
from vllm_segreuse.kernels.pages import Carried, Moves, Part, TiledStrides

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LIBRARIES = {
    "AMX": ("amx", "avx512", "avx2", "baseline"),
    "AVX512": ("avx512", "avx2", "baseline"),
    "AVX2": ("avx2", "baseline"),
}
_VECTOR = 16  # head sizes of attention and scores are multiples of the widest vector


def unavailable() -> str | None:
    """Why this machine cannot run the C++ kernels, or None if it can."""
    try:
        load_library()
    except OSError as error:
        return str(error)
    return None


def instruction_set() -> str:
    """What the loaded library was compiled for: "amx", "avx512", "avx2" or "baseline"."""
    return Path(load_library()._name).stem.removeprefix("_cpu_")


def capability() -> str:
    """What this machine has: torch's name of it, or "AMX" if there is a matrix unit, too."""
    found: str = torch.backends.cpu.get_cpu_capability()
    matrix = torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported()
    # The system gives a process the unit's registers when it asks for them.
    return "AMX" if found == "AVX512" and matrix and torch.cpu._init_amx() else found


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library for the widest instruction set that both build and machine have."""
    folder = Path(__file__).parent
    names = _LIBRARIES.get(capability(), ("baseline",))
    for name in names:
        path = folder / f"_cpu_{name}.so"
        if path.exists():
            library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL)
            _check_age(library, path)
            for name in STRUCTURES:
                function = getattr(library, f"segreuse_{name}")
                function.argtypes, function.restype = [ctypes.c_void_p], None
            return library
    raise OSError(
        f"no _cpu_*.so in {folder}: the C++ kernels were not built (no compiler at installation, "
        "or it failed: pip install -v tells why)"
    )


def _check_age(library: ctypes.CDLL, path: Path) -> None:
    """Raises OSError for a library that was left behind by an older build."""
    expected = [ctypes.sizeof(args) for args in STRUCTURES.values()]
    found = (ctypes.c_int64 * len(expected))()
    try:
        library.segreuse_sizes(found)
    except AttributeError:
        found[0] = -1
    if list(found) != expected:
        raise OSError(f"{path} is of another version of the sources: install the package again")


def align(
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    moves: Moves,
    sources: Sequence[torch.Tensor] | None = None,
    codec: Codec = Codec.RAW,
) -> None:
    """As `reference.align`, bit for bit.

    Raises:
        ValueError: the arguments are not as described there, or slots lie outside of the pages.
    """
    if not len(moves) or not pages:
        return
    check_on_cpu("pages", pages[0])
    check_pages(pages, tuple(DTYPES))
    check_parts(parts, pages[0])
    if codec is Codec.RAW:
        read, place = check_sources(sources, pages), EncodedPage(0, 0, 0)
    else:
        read, place = check_encoded(sources, parts, pages, codec)
    check_moves(moves, parts, pages[0], read[0])
    first, block_size = pages[0], parts[0].strides.shape[1]
    written, read_from = pointers(pages), pointers(read)
    c_parts = (PartArgs * len(parts))(*(PartArgs.of(part) for part in parts))
    scratch = None
    if moves.overlapping and sources is None:
        width = sum(part.strides.shape[0] * part.strides.shape[2] for part in parts)
        scratch = torch.empty(len(moves) * width * first.element_size(), dtype=torch.uint8)
    call(
        "segreuse_align",
        AlignArgs(
            ctypes.addressof(written),
            len(pages),
            first.stride(0),
            ctypes.addressof(read_from),
            read[0].stride(0),
            ctypes.addressof(c_parts),
            len(parts),
            moves.sources.data_ptr(),
            moves.targets.data_ptr(),
            moves.angles.data_ptr(),
            len(moves),
            block_size,
            moves.cos.data_ptr(),
            moves.sin.data_ptr(),
            moves.cos.shape[-1],
            None if scratch is None else scratch.data_ptr(),
            place.value_scales,
            place.codes,
            DTYPES[first.dtype],
            CODECS[codec],
        ),
    )


def carry(
    pages: torch.Tensor,
    parts: Sequence[Part],
    before: Sequence[torch.Tensor],
    carried: Carried,
) -> None:
    """As `reference.carry`, bit for bit.

    Raises:
        ValueError: the arguments are not as described there, or slots lie outside of the pages.
    """
    if not len(carried):
        return
    check_on_cpu("pages", pages)
    check_pages([pages], tuple(DTYPES))
    check_parts(parts, pages)
    check_carried(carried, parts, before, pages)
    c_parts = (PartArgs * len(parts))(*(PartArgs.of(part) for part in parts))
    of_parts = pointers(before)
    cos_by_pair, sin_by_pair = carried.by_pair
    call(
        "segreuse_carry",
        CarryArgs(
            pages.data_ptr(),
            pages.stride(0),
            ctypes.addressof(c_parts),
            len(parts),
            ctypes.addressof(of_parts),
            carried.changed.data_ptr(),
            len(carried.changed),
            carried.slots.data_ptr(),
            carried.rows.data_ptr(),
            carried.distances.data_ptr(),
            carried.shares.data_ptr(),
            len(carried),
            parts[0].strides.shape[1],
            carried.cos.data_ptr(),
            carried.sin.data_ptr(),
            cos_by_pair.data_ptr(),
            sin_by_pair.data_ptr(),
            len(carried.cos),
            DTYPES[pages.dtype],
        ),
    )


def supports_attention(
    keys: TiledStrides, dtype: torch.dtype, queries: torch.dtype | None = None
) -> bool:
    """Whether `sparse_attention` and `token_scores` take pages of this shape and dtype, and queries
    of theirs."""
    return keys.shape[2] % _VECTOR == 0 and fit(queries or dtype, dtype, _FLOATS)


def sparse_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    keys: TiledStrides,
    values: TiledStrides,
    block_tables: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    value_scale: float = 1.0,
) -> None:
    """As `reference.sparse_attention`; in addition, computes in float32.

    Raises:
        ValueError: the arguments are not as described there, or block tables name pages that do
            not exist.
    """
    if not query.shape[0]:
        return
    _check(query, pages, keys)
    check_strides(values, pages)
    if values.shape != keys.shape:
        raise ValueError(f"values are {values.shape} per page; expected {keys.shape}, as keys are")
    check_tensor("out", out, query.dtype, query.device)
    if out.shape != query.shape:
        raise ValueError(f"out is {tuple(out.shape)}; expected {tuple(query.shape)}, as query is")
    check_places(query, block_tables, request, positions, keys.shape[1])
    check_tables(block_tables, request, positions, keys.shape[1], pages)
    check_weights(query, window, sinks, soft_cap)
    query, tables = query.contiguous(), block_tables.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    call(
        "segreuse_attention",
        AttentionArgs(
            out.data_ptr(),
            query.data_ptr(),
            pages.data_ptr(),
            pages.stride(0),
            Strides.of(keys),
            Strides.of(values),
            tables.data_ptr(),
            tables.stride(0),
            request.data_ptr(),
            positions.data_ptr(),
            query.shape[0],
            query.shape[1],
            _weights(sinks, scale, soft_cap),
            window,
            value_scale,
            DTYPES[query.dtype],
            DTYPES[pages.dtype],
        ),
    )


def token_scores(
    query: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    keys: TiledStrides,
    block_ids: torch.Tensor,
    num_tokens: int,
    scale: float,
    highest: bool = False,
    *,
    last: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """As `reference.token_scores`; in addition, the same in every run, whatever the number of
    threads.

    Raises:
        ValueError: the arguments are not as described there, or block ids name pages that do not
            exist.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}; expected 0 or more")
    check_last(last, highest)
    scores = torch.zeros(*(num_tokens,) if last is None else (2, num_tokens), dtype=torch.float32)
    if not query.shape[0] or not num_tokens:
        return scores
    _check(query, pages, keys)
    check_positions(query, positions)
    check_weights(query, 0, sinks, soft_cap)
    # No query sees a key behind its own position: what lies behind the last one stays 0.
    end = int(positions[-1]) + 1
    check_blocks(block_ids, -(-end // keys.shape[1]), pages)
    query, blocks = query.contiguous(), block_ids.to(torch.int32).contiguous()
    seen = min(num_tokens, end)
    sinks = None if sinks is None else sinks.float().contiguous()
    call(
        "segreuse_scores",
        ScoreArgs(
            scores.data_ptr(),
            None if last is None else scores[1].data_ptr(),
            query.data_ptr(),
            pages.data_ptr(),
            pages.stride(0),
            Strides.of(keys),
            blocks.data_ptr(),
            positions.data_ptr(),
            query.shape[0],
            query.shape[1],
            seen,
            query.shape[0] - (last or 0),
            _weights(sinks, scale, soft_cap),
            DTYPES[query.dtype],
            DTYPES[pages.dtype],
            highest,
        ),
    )
    return scores


def pointers(pages: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where each layer begins."""
    return (ctypes.c_void_p * len(pages))(*(layer.data_ptr() for layer in pages))


def _weights(sinks: torch.Tensor | None, scale: float, soft_cap: float) -> Weights:
    if not scale > 0:  # the kernels divide by it
        raise ValueError(f"scale is {scale}; expected more than 0")
    return Weights(None if sinks is None else sinks.data_ptr(), scale, soft_cap)


def _check(query: torch.Tensor, pages: torch.Tensor, keys: TiledStrides) -> None:
    check_on_cpu("pages", pages)
    check_queries(query, pages, keys, _FLOATS)
    if not supports_attention(keys, pages.dtype, query.dtype):
        raise ValueError(
            f"keys have a head size of {keys.shape[2]}; the C++ kernel takes multiples of {_VECTOR}"
        )


def check_on_cpu(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor on another device."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} are on {tensor.device}; the C++ kernels need them on the CPU")


def call(function: str, args: Any) -> None:
    """Call a function of the library; `args` is its structure."""
    getattr(load_library(), function)(ctypes.byref(args))
