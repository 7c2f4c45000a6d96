# SPDX-License-Identifier: Apache-2.0
"""`align` in CUDA: csrc/cuda/align.cu, called through ctypes.

The library is plain C (pointers, sizes, a stream), so that one build serves every version of torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_segreuse.kernels.pages import Moves, Part, Rotation, TiledStrides

_FORMATS = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # the order of `with_format` in align.cu
_MAX_PARTS = 2
_SCRATCH_BYTES = 256 << 20  # for overlapping moves; layers that do not fit take turns


class _Part(ctypes.Structure):
    _fields_ = (("strides", ctypes.c_int32 * 11), ("rotation", ctypes.c_int32 * 3))


class _Call(ctypes.Structure):
    """`AlignCall` of align.cu."""

    _fields_ = (
        ("layers", ctypes.POINTER(ctypes.c_void_p)),
        ("num_layers", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
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


def align(pages: Sequence[torch.Tensor], parts: Sequence[Part], moves: Moves) -> None:
    """`kernels.reference.align` on a GPU, queued on the current stream; see there for arguments.

    One launch for up to 128 layers; two for every 256 MiB of moved data if `moves.overlapping`.
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
        run(_library(), pages, parts, moves, torch.cuda.current_stream(device).cuda_stream)


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
    """Load a build of csrc/cuda/align.cu.

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
        raise RuntimeError(f"{path} is not a build of csrc/cuda ({error}); build it anew") from None
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
) -> None:
    """Check the arguments of `align` and hand them to a library, current device and stream given.

    Raises:
        ValueError: if the arguments are refused.
        RuntimeError: if a launch failed.
    """
    if not pages:
        return
    call = make_call(pages, parts, moves)
    if not len(moves):
        return
    scratch = None  # a name that lives as long as the call
    if moves.overlapping:
        layer_bytes = library.segreuse_align_scratch_bytes(call)
        call.scratch_layers = min(len(pages), max(1, _SCRATCH_BYTES // layer_bytes))
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


def make_call(pages: Sequence[torch.Tensor], parts: Sequence[Part], moves: Moves) -> _Call:
    """The C structure of a call of `align`, without scratch. It borrows the tensors' memory.

    Raises:
        ValueError: if the tensors do not fit the description, the parts or each other.
    """
    _check_pages(pages)
    _check_parts(parts, pages[0])
    _check_moves(moves, parts, pages[0].device)
    call = _Call(
        num_layers=len(pages),
        page_stride=pages[0].stride(0),
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
    call.layers = (ctypes.c_void_p * len(pages))(*(layer.data_ptr() for layer in pages))
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


def _check_pages(pages: Sequence[torch.Tensor]) -> None:
    first = pages[0]
    if first.dtype not in _FORMATS:
        raise ValueError(f"pages are {first.dtype}; the CUDA kernels know {_FORMATS}")
    wanted = (first.dtype, first.device, first.shape, first.stride())
    for index, layer in enumerate(pages):
        found = (layer.dtype, layer.device, layer.shape, layer.stride())
        if found != wanted:
            raise ValueError(
                f"dtype, device, shape and strides of all layers must be equal: the first has "
                f"{wanted}, number {index} has {found}"
            )
    if first.dim() != 2 or first.stride(1) != 1 or first.stride(0) < first.shape[1]:
        raise ValueError(
            "pages must be [num_blocks, page_elements] with unit stride in the page, not "
            f"{tuple(first.shape)} with strides {first.stride()}; see `flat_pages`"
        )
    if first.shape[1] >= 1 << 31:
        raise ValueError(f"a page of {first.shape[1]} elements is too large: below 2**31 are known")


def _check_parts(parts: Sequence[Part], pages: torch.Tensor) -> None:
    if not 1 <= len(parts) <= _MAX_PARTS:
        raise ValueError(f"{len(parts)} parts given; the CUDA kernels move 1 to {_MAX_PARTS}")
    block_sizes = {part.strides.shape[1] for part in parts}
    if len(block_sizes) != 1:
        raise ValueError(f"the parts differ in tokens per page: {sorted(block_sizes)}")
    if pages.shape[0] * block_sizes.pop() > 1 << 32:
        raise ValueError(f"{pages.shape[0]} pages have more than the 2**32 slots that are known")
    for part in parts:
        strides, rotation = part.strides, part.rotation
        heads, tokens, channels = strides.shape
        tiles = ((tokens, strides.token_tile), (channels, strides.channel_tile))
        if heads < 1 or any(tile < 1 or size < 1 or size % tile for size, tile in tiles):
            raise ValueError(f"sizes and tiles do not fit each other: {strides}")
        spans = (
            (heads - 1) * strides.head,
            (tokens // strides.token_tile - 1) * strides.token_hi,
            (strides.token_tile - 1) * strides.token_lo,
            (channels // strides.channel_tile - 1) * strides.channel_hi,
            (strides.channel_tile - 1) * strides.channel_lo,
        )
        lowest = strides.offset + sum(span for span in spans if span < 0)
        highest = strides.offset + sum(span for span in spans if span > 0)
        if lowest < 0 or highest >= pages.shape[1]:
            raise ValueError(
                f"elements {lowest} to {highest} of a page of {pages.shape[1]} are described by "
                f"{strides}"
            )
        if rotation is not None and not (
            rotation.dim > 0
            and rotation.dim % 2 == 0
            and 0 <= rotation.first <= channels - rotation.dim
        ):
            raise ValueError(f"a head of {channels} channels cannot turn by {rotation}")


def _check_moves(moves: Moves, parts: Sequence[Part], device: torch.device) -> None:
    for name in ("sources", "targets", "angles"):
        tensor = getattr(moves, name)
        _check_tensor(name, tensor, torch.int64, device)
        if tensor.shape != (len(moves),):
            raise ValueError(
                f"sources, targets and angles must be [tokens]: {name} is {tuple(tensor.shape)}, "
                f"of {len(moves)} tokens"
            )
    dims = {part.rotation.dim for part in parts if part.rotation is not None}
    if not dims:
        return
    for name in ("cos", "sin"):
        tensor = getattr(moves, name)
        _check_tensor(name, tensor, torch.float32, device)
        if tensor.dim() != 2 or tensor.shape != moves.cos.shape or not tensor.shape[0]:
            raise ValueError(
                f"cos and sin must be [distinct, pairs] alike, not empty: {name} is "
                f"{tuple(tensor.shape)}"
            )
    if dims != {2 * moves.cos.shape[1]}:
        raise ValueError(
            f"{sorted(dims)} channels turn, but cos and sin have columns for "
            f"{2 * moves.cos.shape[1]}"
        )


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} on {device}, not {tensor.dtype} on "
            f"{tensor.device} with strides {tensor.stride()}"
        )
