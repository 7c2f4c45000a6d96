# SPDX-License-Identifier: Apache-2.0
"""What is to be computed for a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_segreuse.features.knowledge.chunks import Shape, lengths_of, shape_for
from vllm_segreuse.features.knowledge.compression import CompressionSettings
from vllm_segreuse.features.knowledge.isolated import StandIns
from vllm_segreuse.features.knowledge.store import Tokens


class Work(NamedTuple):
    """What is to be computed for an entry.

    Attributes:
        extra_key: of its namespace.
        num_context: tokens of its context.
        prompts: context and chunk of each part, up to whole blocks.
        lengths: tokens of each chunk.
        compression: None: the entry is all that is computed.
        kept: positions in each chunk that were chosen before; None: they are to be chosen.
        stand_ins: what stands for the document; None: it stands for itself.
    """

    extra_key: str
    num_context: int
    prompts: list[Tokens]
    lengths: list[int]
    compression: CompressionSettings | None = None
    kept: list[Tokens] | None = None
    stand_ins: StandIns | None = None


def work_for(
    shape: Shape,
    extra_key: str,
    context: Tokens,
    tokens: Tokens,
    compression: CompressionSettings | None,
    kept: Tokens | None,
) -> Work:
    """What is to be computed for a document.

    Args:
        kept: positions in the document that were chosen before.
    """
    cut = shape_for(shape, compression, len(context))
    lengths = lengths_of(cut, len(context), len(tokens))
    prompts = cut.prompts(context, tokens)
    work = Work(extra_key, len(context), prompts, lengths, compression, None, cut.stand_ins)
    if compression is None or kept is None:
        return work
    ends = np.cumsum(lengths)
    parts = [
        kept[(kept >= end - length) & (kept < end)] - (end - length)
        for end, length in zip(ends, lengths, strict=True)
    ]
    # Chunks may have been others then.
    fits = all(len(part) == compression.count(n) for part, n in zip(parts, lengths, strict=True))
    return work._replace(kept=parts) if fits else work


def joined(work: Work, kept: Sequence[Tokens]) -> Tokens:
    """Positions in the document, of positions in each of its chunks."""
    firsts = np.cumsum([0, *work.lengths[:-1]])
    parts = [part + first for part, first in zip(kept, firsts, strict=True)]
    return np.concatenate(parts).astype(np.int32)
