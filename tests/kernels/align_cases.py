# SPDX-License-Identifier: Apache-2.0
"""Layouts, rotations, caches and moves to test `align` with, and its check by the reference."""

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.prefill.pages import BLOCK_SIZE, HALF, LAYOUTS, make_layer
from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.pages import Moves, Part, Rotation, TiledStrides
from vllm_segreuse.model.kv_layout import discover_layout

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Where keys and values lie in a page of so many elements."""

    page_elements: int
    keys: TiledStrides
    values: TiledStrides


def nhd(heads: int, block_size: int, channels: int) -> Shape:
    """`[2, token, head, channel]`"""
    half = heads * block_size * channels
    shape = (heads, block_size, channels)
    rest = (channels, block_size, 0, heads * channels, channels, 0, 1)
    return Shape(2 * half, TiledStrides(shape, 0, *rest), TiledStrides(shape, half, *rest))


def hnd(heads: int, block_size: int, channels: int) -> Shape:
    """`[2, head, token, channel]`"""
    half = heads * block_size * channels
    shape = (heads, block_size, channels)
    rest = (block_size * channels, block_size, 0, channels, channels, 0, 1)
    return Shape(2 * half, TiledStrides(shape, 0, *rest), TiledStrides(shape, half, *rest))


def mla(latent: int, turning: int) -> Shape:
    """`[token, latent | k_pe]`: the key that turns lies behind the value, and is narrower."""
    row = latent + turning

    def part(offset: int, channels: int) -> TiledStrides:
        return TiledStrides((1, 16, channels), offset, 0, 16, 0, row, channels, 0, 1)

    return Shape(16 * row, part(latent, turning), part(0, latent))


def channel_tiles(heads: int, block_size: int, channels: int, tile: int) -> Shape:
    """`[2, head, channel tile, token, channel]`"""
    half = heads * block_size * channels
    shape = (heads, block_size, channels)
    rest = (block_size * channels, block_size, 0, tile, tile, block_size * tile, 1)
    return Shape(2 * half, TiledStrides(shape, 0, *rest), TiledStrides(shape, half, *rest))


@cache
def shape_of(name: str) -> Shape:
    if name in LAYOUTS:
        proven = discover_layout(make_layer(name), BLOCK_SIZE)
        return Shape(2 * HALF, proven.keys, proven.values)
    return GPU_SHAPES[name]


# The CPU backends' ways to pack a page are above; these are the GPU backends', with awkward sizes.
GPU_SHAPES = {
    "NHD 8x128": nhd(8, 16, 128),
    "HND 8x128": hnd(8, 16, 128),
    "HND 2x80": hnd(2, 16, 80),
    "NHD 3x36": nhd(3, 16, 36),  # a third of a vector is left over, or half
    "NHD 3x72": nhd(3, 16, 72),  # an odd number of vectors
    "NHD 40x128": nhd(40, 8, 128),  # more vectors per token than threads per block
    "channel tiles": channel_tiles(3, 16, 64, 16),
    "MLA 512+64": mla(512, 64),
}

# Rotation of each head size to be tested with.
ROTATIONS: dict[int, tuple[Rotation | None, ...]] = {
    32: (
        Rotation(32, True),
        Rotation(32, False),
        Rotation(16, True, 8),
        Rotation(8, False, 2),
        Rotation(6, True, 26),
        None,
    ),
    36: (Rotation(36, True), Rotation(20, False)),
    64: (Rotation(64, True), Rotation(64, False), Rotation(32, False, 16)),
    72: (Rotation(72, True), Rotation(48, False, 16), Rotation(64, True)),
    80: (Rotation(80, False), Rotation(32, True), Rotation(64, True, 16)),
    128: (Rotation(128, True), Rotation(128, False), Rotation(64, True), Rotation(32, False, 48)),
}

NAMES = [*LAYOUTS, *GPU_SHAPES]
CASES = [
    pytest.param(name, rotation, id=f"{name}-{rotation}")
    for name in NAMES
    for rotation in ROTATIONS[shape_of(name).keys.shape[2]]
]


def parts_of(shape: Shape, rotation: Rotation | None) -> list[Part]:
    return [Part(shape.keys, rotation), Part(shape.values, None)]


@dataclasses.dataclass
class Cache:
    """Layers in one allocation that is compared whole: nothing beside a page may change.

    Attributes:
        memory: `[elements]`.
        layers: flat pages of each layer, in `memory`.
    """

    memory: torch.Tensor
    layers: list[torch.Tensor]


def make_cache(
    page_elements: int,
    num_blocks: int,
    dtype: torch.dtype,
    num_layers: int = 1,
    gap: int = 16,
    start: int = 16,
) -> Cache:
    """Random finite numbers; for fp8, every code there is.

    Args:
        gap: elements between pages.
        start: elements before the first; vectors of a multiple of 16 are aligned.
    """
    stride = page_elements + gap
    layer_elements = num_blocks * stride
    count = start + num_layers * layer_elements
    if dtype.itemsize == 1:
        memory = torch.randint(0, 256, (count,)).to(torch.uint8).view(dtype)
    else:
        memory = (torch.randn(count) * 8).to(dtype)
    layers = [
        memory.as_strided((num_blocks, page_elements), (stride, 1), start + layer * layer_elements)
        for layer in range(num_layers)
    ]
    return Cache(memory, layers)


def make_region(
    page_elements: int,
    num_rows: int,
    dtype: torch.dtype,
    num_layers: int = 1,
    start: int = 3,
    gap: int = 16,
) -> Cache:
    """As `make_cache`, but a row has all layers one after the other, as in a host region.

    Args:
        start: elements before the first row; with 3, nothing is aligned.
        gap: elements between rows.
    """
    stride = num_layers * page_elements + gap
    memory = make_cache(stride, num_rows, dtype, gap=0, start=start).memory
    layers = [
        memory.as_strided((num_rows, page_elements), (stride, 1), start + layer * page_elements)
        for layer in range(num_layers)
    ]
    return Cache(memory, layers)


def copy_of(pages: Cache, device: str = "cpu") -> Cache:
    memory = pages.memory.to(device, copy=True)
    layers = [
        memory.as_strided(layer.shape, layer.stride(), layer.storage_offset())
        for layer in pages.layers
    ]
    return Cache(memory, layers)


def make_moves(
    num_blocks: int, block_size: int, num_tokens: int, pairs: int, overlapping: bool
) -> Moves:
    """Random moves; without overlap from the first half of the pages to the second."""
    slots = num_blocks * block_size
    middle = 0 if overlapping else num_blocks // 2 * block_size
    assert num_tokens <= slots - middle
    angle = torch.rand(7, pairs) * 6.3
    return Moves(
        sources=torch.randint(0, slots if overlapping else middle, (num_tokens,)),
        targets=middle + torch.randperm(slots - middle)[:num_tokens],
        angles=torch.randint(0, 7, (num_tokens,)),
        cos=angle.cos(),
        sin=angle.sin(),
        overlapping=overlapping,
    )


def make_loads(
    num_rows: int, num_blocks: int, block_size: int, num_tokens: int, pairs: int
) -> Moves:
    """Random moves from anywhere in other pages to anywhere in the cache.

    They say that they overlap: of other pages that is never true, and does not matter.
    """
    moves = make_moves(num_blocks, block_size, num_tokens, pairs, overlapping=True)
    sources = torch.randint(0, num_rows * block_size, (num_tokens,))
    return dataclasses.replace(moves, sources=sources)


def to_device(moves: Moves, device: str) -> Moves:
    names = ("sources", "targets", "angles", "cos", "sin")
    return dataclasses.replace(moves, **{name: getattr(moves, name).to(device) for name in names})


def pairs_of(parts: list[Part]) -> int:
    rotation = parts[0].rotation
    return 4 if rotation is None else rotation.dim // 2


def good_call() -> tuple[list[torch.Tensor], list[Part], Moves]:
    """Arguments of `align` that every kernel takes: nine tokens, three layers, four pages."""
    shape = nhd(2, 16, 32)
    pages = make_cache(shape.page_elements, 4, torch.float16, num_layers=3)
    return pages.layers, parts_of(shape, Rotation(32, True)), make_moves(4, 16, 9, 16, False)


Run = Callable[..., None]
"""With arguments as `reference.align`."""


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the last bit, the sign of zero included; one NaN is as good as another."""
    bits = BITS[expected.dtype.itemsize]
    different = found.view(bits) != expected.view(bits)
    different &= ~(found.float().isnan() & expected.float().isnan())
    assert not different.any(), (found.float()[different], expected.float()[different])


def assert_agrees(
    run: Run,
    pages: Cache,
    parts: list[Part],
    moves: Moves,
    device: str,
    sources: Cache | None = None,
) -> None:
    """`run` changes the memory exactly as the reference does."""
    mine = copy_of(pages, device)
    expected = copy_of(pages)
    if sources is None:
        run(mine.layers, parts, to_device(moves, device))
        reference.align(expected.layers, parts, moves)
    else:
        read = copy_of(sources, device)
        run(mine.layers, parts, to_device(moves, device), read.layers)
        reference.align(expected.layers, parts, moves, sources.layers)
        assert_same(read.memory.cpu(), sources.memory)
    bits = BITS[pages.memory.dtype.itemsize]
    assert not torch.equal(expected.memory.view(bits), pages.memory.view(bits))
    assert_same(mine.memory.cpu(), expected.memory)
