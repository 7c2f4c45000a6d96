# SPDX-License-Identifier: Apache-2.0
"""What every native kernel is given, checked before any address is passed on.

Kernels take pointers: a wrong dtype, stride or device would be read as something else. Values are
checked where reading them costs nothing, which is on a CPU; a GPU would have to wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_segreuse.kernels.codecs import Codec, EncodedPage
from vllm_segreuse.kernels.pages import Carried, Moves, Part, TiledStrides

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""What pages may hold beside the dtype of queries."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What codecs encode."""


def check_pages(pages: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Flat pages of layers that are moved by one call.

    Raises:
        ValueError: of unknown dtype, not alike, or not flat.
    """
    first = pages[0]
    if first.dtype not in dtypes:
        known = ", ".join(map(str, dtypes))
        raise ValueError(f"pages are {first.dtype}; the kernel knows {known}")
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


def check_sources(
    sources: Sequence[torch.Tensor] | None, pages: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Where tokens are read: `pages`, or other pages of the same layers.

    Raises:
        ValueError: another number of layers, another dtype, device or page size, or what
            `check_pages` refuses.
    """
    if sources is None:
        return pages
    if len(sources) != len(pages):
        raise ValueError(f"sources are of {len(sources)} layers, pages of {len(pages)}")
    check_pages(sources, (pages[0].dtype,))
    found, wanted = (
        (layers[0].dtype, layers[0].device, layers[0].shape[1]) for layers in (sources, pages)
    )
    if found != wanted:
        raise ValueError(
            f"dtype, device and page size of sources must be those of pages: {found} instead of "
            f"{wanted}"
        )
    return sources


def check_strides(strides: TiledStrides, pages: torch.Tensor) -> None:
    """Where keys or values lie in a page.

    Raises:
        ValueError: tiles that do not divide a page, or elements outside of it.
    """
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


def check_parts(parts: Sequence[Part], pages: torch.Tensor) -> None:
    """The keys and the values of a page, and what of them turns.

    Raises:
        ValueError: none at all, other block sizes, or what `check_strides` refuses.
    """
    if not parts:
        raise ValueError("0 parts given; pass the keys, the values, or both")
    block_sizes = {part.strides.shape[1] for part in parts}
    if len(block_sizes) != 1:
        raise ValueError(f"the parts differ in tokens per page: {sorted(block_sizes)}")
    for part in parts:
        check_strides(part.strides, pages)
        rotation, channels = part.rotation, part.strides.shape[2]
        if rotation is not None and not (
            rotation.dim > 0
            and rotation.dim % 2 == 0
            and 0 <= rotation.first <= channels - rotation.dim
        ):
            raise ValueError(f"a head of {channels} channels cannot turn by {rotation}")


def check_moves(
    moves: Moves, parts: Sequence[Part], pages: torch.Tensor, sources: torch.Tensor
) -> None:
    """Slots, angles and their tables; on a CPU also that they are inside pages and tables.

    Args:
        pages: of one layer, which are written.
        sources: of one layer, which are read.

    Raises:
        ValueError: wrong dtypes, devices, shapes, strides or values.
    """
    device = pages.device
    for name in ("sources", "targets", "angles"):
        tensor = getattr(moves, name)
        check_tensor(name, tensor, torch.int64, device)
        if tensor.shape != (len(moves),):
            raise ValueError(
                f"sources, targets and angles must be [tokens]: {name} is {tuple(tensor.shape)}, "
                f"of {len(moves)} tokens"
            )
    block_size = parts[0].strides.shape[1]
    check_range("sources", moves.sources, sources.shape[0] * block_size)
    check_range("targets", moves.targets, pages.shape[0] * block_size)
    dims = {part.rotation.dim for part in parts if part.rotation is not None}
    if not dims:
        return
    for name in ("cos", "sin"):
        tensor = getattr(moves, name)
        check_tensor(name, tensor, torch.float32, device)
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
    check_range("angles", moves.angles, moves.cos.shape[0])


def check_encoded(
    cells: Sequence[torch.Tensor] | None,
    parts: Sequence[Part],
    pages: Sequence[torch.Tensor],
    codec: Codec,
) -> tuple[Sequence[torch.Tensor], EncodedPage]:
    """Encoded pages of the same layers, and where things lie in one of them.

    Raises:
        ValueError: pages that are no keys and values in a floating-point dtype of 16 or 32 bits,
            none or other encoded pages, or what `check_pages` refuses.
    """
    if pages[0].dtype not in FLOATS:
        raise ValueError(
            f"pages of {pages[0].dtype} are stored by the codec raw alone, not {codec}"
        )
    if len(parts) != 2:
        raise ValueError(f"{len(parts)} parts given; the codec {codec} stores keys and values")
    if cells is None or len(cells) != len(pages):
        layers = "no" if cells is None else len(cells)
        raise ValueError(f"encoded pages of {layers} layers given, pages of {len(pages)}")
    check_pages(cells, (torch.uint8,))
    keys, values = (part.strides.shape for part in parts)
    place = EncodedPage.of(keys, values, pages[0].shape[1])
    if cells[0].shape[1] != place.size or cells[0].device != pages[0].device:
        raise ValueError(
            f"encoded pages have {cells[0].shape[1]} bytes on {cells[0].device}; expected "
            f"{place.size} on {pages[0].device}"
        )
    return cells, place


def check_stored(
    blocks: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, cells: torch.Tensor
) -> None:
    """Which pages are stored, and where; on a CPU also that these exist.

    Raises:
        ValueError: wrong dtypes, devices, shapes or values.
    """
    for name, tensor, end in (("blocks", blocks, len(pages)), ("rows", rows, len(cells))):
        check_tensor(name, tensor, torch.int64, pages.device)
        if tensor.shape != (len(blocks),):
            raise ValueError(
                f"blocks and rows must be [blocks] alike: {name} is {tuple(tensor.shape)}, of "
                f"{len(blocks)}"
            )
        check_range(name, tensor, end)


def fit(queries: torch.dtype, pages: torch.dtype, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether queries of one dtype, of those that a kernel computes in, attend to pages of another:
    the same, or fp8."""
    return queries in dtypes and pages in (queries, *FP8)


def check_queries(
    query: torch.Tensor, pages: torch.Tensor, keys: TiledStrides, dtypes: Sequence[torch.dtype]
) -> None:
    """Queries against the pages of one layer.

    Raises:
        ValueError: they do not fit the pages, or the pages their description.
    """
    check_pages([pages], (*dtypes, *FP8))
    check_strides(keys, pages)
    kv_heads, _, head_size = keys.shape
    if not fit(query.dtype, pages.dtype, dtypes) or query.device != pages.device:
        raise ValueError(
            f"query is {query.dtype} on {query.device}; pages are {pages.dtype} on {pages.device}, "
            "and it must be alike, unless these are fp8"
        )
    shaped = query.dim() == 3 and query.shape[2] == head_size
    if not shaped or not query.shape[1] or query.shape[1] % kv_heads:
        raise ValueError(
            f"query is {tuple(query.shape)}; expected [queries, heads, {head_size}], with a "
            f"multiple of {kv_heads} KV heads"
        )


def check_places(
    query: torch.Tensor,
    block_tables: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> None:
    """Which keys each query sees; on a CPU also that block tables reach so far, and the order.

    Raises:
        ValueError: wrong dtypes, devices, shapes, strides, values or order.
    """
    for name, tensor in (("request", request), ("positions", positions)):
        _check_per_query(name, tensor, query)
    if (
        block_tables.dtype != torch.int32
        or block_tables.device != query.device
        or block_tables.dim() != 2
    ):
        raise ValueError(
            f"block_tables is {block_tables.dtype} {tuple(block_tables.shape)} on "
            f"{block_tables.device}; expected torch.int32 [requests, blocks] on {query.device}"
        )
    check_range("request", request, block_tables.shape[0])
    check_range("positions", positions, block_tables.shape[1] * block_size)
    if query.device.type != "cpu":
        return
    row, place = request.diff(), positions.diff()
    unsorted = (row < 0) | ((row == 0) & (place < 0))
    if bool(unsorted.any()):
        first = int(unsorted.nonzero()[0])
        raise ValueError(
            f"request and positions of query {first + 1} are before those of query {first}; sort "
            "queries by request, then by position"
        )


def check_positions(query: torch.Tensor, positions: torch.Tensor) -> None:
    """Where the queries of one request are.

    Raises:
        ValueError: wrong dtype, device, shape or strides; on a CPU also negative or descending.
    """
    _check_per_query("positions", positions, query)
    if query.device.type != "cpu":
        return
    if int(positions[0]) < 0 or bool((positions.diff() < 0).any()):
        raise ValueError(
            f"positions from {int(positions.min())} to {int(positions.max())} are not ascending "
            "from 0; sort them and the queries"
        )


def check_weights(
    query: torch.Tensor, window: int, sinks: torch.Tensor | None, soft_cap: float
) -> None:
    """How logits become weights: `reference.attend`.

    Raises:
        ValueError: numbers below 0, or sinks that are not one floating-point number for each head.
    """
    if window < 0 or not soft_cap >= 0:
        raise ValueError(f"window is {window} and soft_cap {soft_cap}; expected 0 or more")
    if sinks is None:
        return
    heads = query.shape[1]
    if sinks.shape != (heads,) or not sinks.is_floating_point() or sinks.device != query.device:
        raise ValueError(
            f"sinks are {tuple(sinks.shape)} {sinks.dtype} on {sinks.device}; expected {heads} "
            f"floating-point numbers on {query.device}"
        )


def check_last(last: int | None, highest: bool) -> None:
    """Which queries of `reference.token_scores` are summed up twice.

    Raises:
        ValueError: a number below 0, or peaks are wanted.
    """
    if last is not None and (last < 0 or highest):
        raise ValueError(f"last is {last}, highest {highest}; expected 0 or more, and sums")


def check_tables(
    block_tables: torch.Tensor,
    request: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    pages: torch.Tensor,
) -> None:
    """Entries that queries read name pages that exist; for sorted queries on a CPU.

    Raises:
        ValueError: an id outside the pages.
    """
    rows, counts = request.unique_consecutive(return_counts=True)
    used = positions[counts.cumsum(0) - 1] // block_size + 1
    for row, count in zip(rows.tolist(), used.tolist(), strict=True):
        check_range("block_tables", block_tables[row, :count], pages.shape[0])


def check_blocks(block_ids: torch.Tensor, used: int, pages: torch.Tensor) -> None:
    """The first `used` entries of a request's block table name pages that exist.

    Raises:
        ValueError: too few entries, no integers, or on a CPU an id outside the pages.
    """
    if block_ids.dim() != 1 or block_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"block_ids is {block_ids.dtype} {tuple(block_ids.shape)}; expected torch.int32 or "
            "torch.int64 [blocks]"
        )
    if block_ids.device != pages.device:
        raise ValueError(f"block_ids is on {block_ids.device}; expected {pages.device}")
    if len(block_ids) < used:
        raise ValueError(f"block_ids has {len(block_ids)} entries; the tokens fill {used} pages")
    check_range("block_ids", block_ids[:used], pages.shape[0])


def _check_per_query(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    check_tensor(name, tensor, torch.int64, query.device)
    if tensor.shape != query.shape[:1]:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)}; expected one number for each of "
            f"{query.shape[0]} queries"
        )


def check_carried(
    carried: Carried, parts: Sequence[Part], before: Sequence[torch.Tensor], pages: torch.Tensor
) -> None:
    """Slots, rows, distances, shares, tables, and what was before; on a CPU also that they are
    inside.

    Args:
        pages: of one layer, which are written.

    Raises:
        ValueError: wrong dtypes, devices, shapes, strides or values.
    """
    device, tokens = pages.device, len(carried)
    for name in ("slots", "rows", "distances"):
        tensor = getattr(carried, name)
        check_tensor(name, tensor, torch.int64, device)
        if tensor.shape != (tokens,):
            raise ValueError(
                f"slots, rows and distances must be [tokens]: {name} is {tuple(tensor.shape)}, of "
                f"{tokens} tokens"
            )
    check_tensor("changed", carried.changed, torch.int64, device)
    check_tensor("shares", carried.shares, torch.float32, device)
    if carried.shares.shape != (len(parts), tokens):
        raise ValueError(
            f"shares are {tuple(carried.shares.shape)}; expected {(len(parts), tokens)}"
        )
    if len(before) != len(parts):
        raise ValueError(f"{len(parts)} parts were {len(before)} before")
    rows = len(carried.changed)
    for part, old in zip(parts, before, strict=True):
        heads, _, channels = part.strides.shape
        check_tensor("before", old, pages.dtype, device)
        if old.shape != (rows, heads, channels):
            raise ValueError(f"before is {tuple(old.shape)}; expected {(rows, heads, channels)}")
        if part.rotation is not None:
            for name in ("cos", "sin"):
                tensor = getattr(carried, name)
                check_tensor(name, tensor, torch.float32, device)
                if tensor.shape != (len(carried.cos), part.rotation.dim // 2):
                    raise ValueError(
                        f"cos and sin must be [distances, pairs]: {name} is {tuple(tensor.shape)}, "
                        f"where {part.rotation.dim} channels turn"
                    )
            check_range("distances", carried.distances, len(carried.cos))
    slots = pages.shape[0] * parts[0].strides.shape[1]
    check_range("slots", carried.slots, slots)
    check_range("changed", carried.changed, slots)
    check_range("rows", carried.rows, rows, start=-1)


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for another dtype or device, or a tensor that is not contiguous."""
    if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} on {device}, not {tensor.dtype} on "
            f"{tensor.device} with strides {tensor.stride()}"
        )


def check_range(name: str, tensor: torch.Tensor, end: int, start: int = 0) -> None:
    """Raises ValueError for a number outside `[start, end)`, on a CPU."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    lowest, highest = (int(number) for number in tensor.aminmax())
    if lowest < start or highest >= end:
        raise ValueError(f"{name} are from {lowest} to {highest}; expected {start} to {end - 1}")
