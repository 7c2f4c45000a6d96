# SPDX-License-Identifier: Apache-2.0
"""`align` in CUDA: kernels/cuda/align.cu, called through ctypes.

The library is plain C (pointers, sizes, a stream), so that one build serves every version of torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_segreuse.kernels.arguments import (
    check_moves,
    check_pages,
    check_parts,
    check_sources,
)
from vllm_segreuse.kernels.pages import Moves, PageLayout, Part, Rotation, TiledStrides
from vllm_segreuse.kernels.scratch import layers_at_once

_FORMATS = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # the order of `with_format` in align.cu
_MAX_PARTS = 2


class _Part(ctypes.Structure):
    _fields_ = (("strides", ctypes.c_int32 * 11), ("rotation", ctypes.c_int32 * 3))


class _Call(ctypes.Structure):
    """`AlignCall` of align.cu."""

    _fields_ = (
        ("layers", ctypes.POINTER(ctypes.c_void_p)),
        ("num_layers", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("read", ctypes.POINTER(ctypes.c_void_p)),
        ("read_stride", ctypes.c_int64),
        ("format", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("parts", _Part * _MAX_PARTS),
        ("sources", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("scratch_layers", ctypes.c_int64),
    )


def supports(layout: PageLayout, dtype: torch.dtype) -> bool:
    """Whether `align` takes pages of this layout and dtype."""
    return dtype in _FORMATS


@functools.cache
def unavailable() -> str | None:
    """Why the CUDA kernels cannot run here, in one sentence; None if they can."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        library = _library()
    except (OSError, RuntimeError) as error:
        return str(error)
    torch.cuda.init()
    status = library.segreuse_status()
    return f"their build does not suit this GPU: {_message(library, status)}" if status else None


def align(
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    moves: Moves,
    sources: Sequence[torch.Tensor] | None = None,
) -> None:
    """As `reference.align`; in addition, queued on the current stream: one launch for up to 128
    layers, or two for as many as fit the scratch (`scratch.py`) if `moves.overlapping` and no
    `sources` are given.

    Slots and angle rows are not checked against the pages and tables: that would stall the stream.

    Raises:
        ValueError: if the tensors do not fit the description, the parts or each other.
        RuntimeError: if the kernels cannot run here, or a launch failed.
    """
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(f"the CUDA kernels cannot run: {reason}")
    if not pages:
        return
    device = pages[0].device
    if device.type != "cuda":
        raise ValueError(f"pages are on {device}; the CUDA kernels need them on a GPU")
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        run(_library(), pages, parts, moves, stream, sources)


@functools.cache
def _library() -> ctypes.CDLL:
    here = Path(__file__).resolve().parent
    found = sorted(here.glob("_cuda*.so"))
    if not found:
        raise RuntimeError(
            f"no _cuda*.so in {here}: the package was built without nvcc; install it from source "
            "where nvcc is on the path"
        )
    return open_library(found[0])


def open_library(path: Path) -> ctypes.CDLL:
    """Load a build of kernels/cuda/align.cu.

    Raises:
        OSError: if it cannot be loaded.
        RuntimeError: if it was built from other sources than this file belongs to.
    """
    library = ctypes.CDLL(str(path))
    try:
        library.segreuse_align_call_bytes.restype = ctypes.c_int64
        size = library.segreuse_align_call_bytes()
        for name in ("vector", "scratch"):
            function = getattr(library, f"segreuse_align_{name}_bytes")
            function.argtypes, function.restype = (ctypes.POINTER(_Call),), ctypes.c_int64
        library.segreuse_status.restype = ctypes.c_int
        library.segreuse_align.argtypes = (ctypes.POINTER(_Call), ctypes.c_void_p)
        library.segreuse_align.restype = ctypes.c_int
        library.segreuse_message.argtypes = (ctypes.c_int,)
        library.segreuse_message.restype = ctypes.c_char_p
    except AttributeError as error:
        raise RuntimeError(
            f"{path} is not a build of kernels/cuda ({error}); build it anew"
        ) from None
    if size != ctypes.sizeof(_Call):
        raise RuntimeError(
            f"{path} takes {size} bytes per call, this version passes {ctypes.sizeof(_Call)}: it "
            "is a build of other sources; build it anew"
        )
    return library


def run(
    library: ctypes.CDLL,
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    moves: Moves,
    stream: int,
    sources: Sequence[torch.Tensor] | None = None,
) -> None:
    """Check the arguments of `align` and hand them to a library, current device and stream given.

    Raises:
        ValueError: if the arguments are refused.
        RuntimeError: if a launch failed.
    """
    if not pages:
        return
    call = make_call(pages, parts, moves, sources)
    if not len(moves):
        return
    scratch = None  # a name that lives as long as the call
    if moves.overlapping and sources is None:
        layer_bytes = library.segreuse_align_scratch_bytes(call)
        call.scratch_layers = layers_at_once(len(pages), layer_bytes)
        scratch = torch.empty(
            call.scratch_layers * layer_bytes, dtype=torch.uint8, device=pages[0].device
        )
        call.scratch = scratch.data_ptr()
    status = library.segreuse_align(call, stream)
    if status:
        raise RuntimeError(
            f"aligning {len(moves)} tokens in {len(pages)} layers failed: "
            f"{_message(library, status)}"
        )


def _message(library: ctypes.CDLL, status: int) -> str:
    return f"{library.segreuse_message(status).decode()} (CUDA error {status})"


def make_call(
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    moves: Moves,
    sources: Sequence[torch.Tensor] | None = None,
) -> _Call:
    """The C structure of a call of `align`, without scratch. It borrows the tensors' memory.

    Raises:
        ValueError: if the tensors do not fit the description, the parts or each other.
    """
    check_pages(pages, _FORMATS)
    check_parts(parts, pages[0])
    if len(parts) > _MAX_PARTS:
        raise ValueError(f"{len(parts)} parts given; the CUDA kernels move 1 to {_MAX_PARTS}")
    read = check_sources(sources, pages)
    for layer in (pages[0], read[0]):
        if layer.shape[0] * parts[0].strides.shape[1] > 1 << 32:
            raise ValueError(
                f"{layer.shape[0]} pages have more than the 2**32 slots that are known"
            )
    check_moves(moves, parts, pages[0], read[0])
    call = _Call(
        num_layers=len(pages),
        page_stride=pages[0].stride(0),
        read_stride=read[0].stride(0),
        format=_FORMATS.index(pages[0].dtype),
        num_parts=len(parts),
        sources=moves.sources.data_ptr(),
        targets=moves.targets.data_ptr(),
        angles=moves.angles.data_ptr(),
        num_tokens=len(moves),
        cos=moves.cos.data_ptr(),
        sin=moves.sin.data_ptr(),
        num_pairs=moves.cos.shape[-1],
    )
    call.layers, call.read = (
        (ctypes.c_void_p * len(layers))(*(layer.data_ptr() for layer in layers))
        for layers in (pages, read)
    )
    for mine, part in zip(call.parts, parts, strict=False):
        mine.strides[:] = _numbers(part.strides)
        mine.rotation[:] = _turn(part.rotation)
    return call


def _numbers(strides: TiledStrides) -> tuple[int, ...]:
    return (
        *strides.shape,
        strides.offset,
        strides.head,
        strides.token_tile,
        strides.token_hi,
        strides.token_lo,
        strides.channel_tile,
        strides.channel_hi,
        strides.channel_lo,
    )


def _turn(rotation: Rotation | None) -> tuple[int, int, int]:
    return (0, 0, 0) if rotation is None else (rotation.dim, rotation.neox, rotation.first)
