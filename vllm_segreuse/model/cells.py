# SPDX-License-Identifier: Apache-2.0
"""What a cell of the host region holds: a block's pages of one rank, one layer after the other.

Raw, pages lie there as in the cache. By a codec (`kernels/codecs.py`) each is scales and codes. The
scheduler's process knows the sizes from vLLM's KV cache specs, workers from the pages themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_segreuse.engine.kv_group import segment_group
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.kernels.codecs import Codec, Shape, stored_bytes
from vllm_segreuse.kernels.dispatch import codec_refused

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_INSTEAD = "; set tier.codec to raw"


class StoredPage(NamedTuple):
    """How a page of one layer lies in a cell.

    Attributes:
        num_bytes: of it.
        dtype: of its elements.
    """

    num_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, pages: torch.Tensor, codec: Codec, keys: Shape, values: Shape) -> StoredPage:
        """For flat pages `[num_blocks, page_elements]` with such keys and values."""
        size = stored_bytes(codec, keys, values, pages.shape[1], pages.element_size())
        return cls(size, pages.dtype if codec is Codec.RAW else torch.uint8)


def cell_content_bytes(kv_cache_config: KVCacheConfig, codec: Codec) -> int:
    """Bytes of one rank's pages of a block, as vLLM's configuration describes them.

    Raises:
        RefusedError: the codec cannot store them.
    """
    if codec is Codec.RAW:
        # Every `KVCacheTensor` gives the size of the whole allocation.
        return int(kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks)
    specs = segment_group(kv_cache_config).specs
    return sum(_encoded_bytes(name, spec, codec) for name, spec in specs.items())


def _encoded_bytes(name: str, spec: Any, codec: Codec) -> int:
    shape = (spec.num_kv_heads, spec.block_size, spec.head_size)
    elements = spec.page_size_bytes // spec.dtype.itemsize
    why = codec_refused(codec, spec.dtype)
    if why is None and elements == prod(shape):
        why = f"latent KV (MLA) of {name} is stored by codec raw only, not {codec}"
    if why is None and elements != 2 * prod(shape):
        why = f"pages of {name} hold more than keys and values"
    if why is not None:
        raise RefusedError(f"tier.codec is {codec}: {why}{_INSTEAD}")
    return stored_bytes(codec, shape, shape, elements, spec.dtype.itemsize)


def views(cells: torch.Tensor, stored: Sequence[StoredPage]) -> list[torch.Tensor]:
    """Cells as pages of each layer.

    Args:
        cells: int8 `[rows, cell_bytes]`, with unit stride in a cell.
        stored: of each layer, in order.

    Returns:
        `[rows, page_elements]` of each layer; by a codec, uint8 `[rows, num_bytes]`.

    Raises:
        RefusedError: they do not fit.
    """
    sizes = [page.num_bytes for page in stored]
    if sum(sizes) > cells.shape[1]:
        raise RefusedError(
            f"a KV block's pages take {sum(sizes)} bytes, of which vLLM's KV cache "
            f"configuration has {cells.shape[1]}; serve this model without `tier`"
        )
    parts = cells[:, : sum(sizes)].split(sizes, dim=1)
    return [part.view(page.dtype) for part, page in zip(parts, stored, strict=True)]
