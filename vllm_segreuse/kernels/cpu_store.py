# SPDX-License-Identifier: Apache-2.0
"""Pages to rows of a host region, in C++ (kernels/cpu/store.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from vllm_segreuse.kernels import cpu
from vllm_segreuse.kernels.arguments import check_pages, check_sources, check_stored
from vllm_segreuse.kernels.cpu_structures import DTYPES, StoreArgs


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
