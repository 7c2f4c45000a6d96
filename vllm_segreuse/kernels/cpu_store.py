# SPDX-License-Identifier: Apache-2.0
"""Pages to rows of a host region, in C++ (kernels/cpu/store.cpp, codecs.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from vllm_segreuse.kernels import cpu
from vllm_segreuse.kernels.arguments import (
    check_encoded,
    check_pages,
    check_parts,
    check_sources,
    check_stored,
)
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.kernels.cpu_structures import CODECS, DTYPES, EncodeArgs, PartArgs, StoreArgs
from vllm_segreuse.kernels.pages import Part


def store(
    pages: Sequence[torch.Tensor],
    cells: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """As `reference.store`.

    Raises:
        ValueError: the arguments are not as described there, or blocks or rows do not exist.
    """
    if not len(blocks) or not pages:
        return
    cpu.check_on_cpu("pages", pages[0])
    check_pages(pages, tuple(DTYPES))
    check_sources(cells, pages)
    check_stored(blocks, rows, pages[0], cells[0])
    first, element_bytes = pages[0], pages[0].element_size()
    read, written = cpu.pointers(pages), cpu.pointers(cells)
    cpu.call(
        "segreuse_store",
        StoreArgs(
            ctypes.addressof(read),
            len(pages),
            first.stride(0) * element_bytes,
            ctypes.addressof(written),
            cells[0].stride(0) * element_bytes,
            first.shape[1] * element_bytes,
            blocks.data_ptr(),
            rows.data_ptr(),
            len(blocks),
        ),
    )


def encode(
    pages: Sequence[torch.Tensor],
    parts: Sequence[Part],
    codec: Codec,
    blocks: torch.Tensor,
    cells: Sequence[torch.Tensor],
    rows: torch.Tensor,
) -> torch.Tensor:
    """As `reference_codecs.encode`, bit for bit but for the rows of blocks that are not encoded.

    Raises:
        ValueError: the arguments are not as described there, or blocks or rows do not exist.
    """
    encoded = torch.ones(len(blocks), dtype=torch.uint8)
    if not len(blocks) or not pages:
        return encoded.bool()
    cpu.check_on_cpu("pages", pages[0])
    check_pages(pages, tuple(DTYPES))
    check_parts(parts, pages[0])
    _, place = check_encoded(cells, parts, pages, codec)
    check_stored(blocks, rows, pages[0], cells[0])
    read, written = cpu.pointers(pages), cpu.pointers(cells)
    c_parts = (PartArgs * len(parts))(*(PartArgs.of(part) for part in parts))
    cpu.call(
        "segreuse_encode",
        EncodeArgs(
            ctypes.addressof(read),
            len(pages),
            pages[0].stride(0),
            ctypes.addressof(c_parts),
            ctypes.addressof(written),
            cells[0].stride(0),
            place.value_scales,
            place.codes,
            blocks.data_ptr(),
            rows.data_ptr(),
            len(blocks),
            encoded.data_ptr(),
            DTYPES[pages[0].dtype],
            CODECS[codec],
        ),
    )
    return encoded.bool()
