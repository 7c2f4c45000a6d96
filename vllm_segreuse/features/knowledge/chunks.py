# SPDX-License-Identifier: Apache-2.0
"""How a document becomes prompts: each chunk behind the same context, up to whole KV blocks.

    | context |        chunk         | filler |
    |  block  |  block  |  block  |  block   |
              └──── frozen: blocks with tokens of the chunk

Only full blocks can be found again. The filler completes the last one; nothing sees it, since
attention is causal. A prompt that contains the text matches it up to its last token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_segreuse.features.knowledge.compression import CompressionSettings
from vllm_segreuse.features.knowledge.errors import InvalidError
from vllm_segreuse.features.knowledge.isolated import StandIns
from vllm_segreuse.features.knowledge.store import Tokens


class Shape(NamedTuple):
    """What decides how documents are cut.

    Attributes:
        block_size: tokens per KV block.
        max_prompt_tokens: longest prompt that leaves room for one token of output.
        chunk_tokens: longest chunk that is wanted.
        stages: pipeline stages of the engine.
        stand_ins: what stands for documents; None: they stand for themselves.
    """

    block_size: int
    max_prompt_tokens: int
    chunk_tokens: int
    stages: int = 1
    stand_ins: StandIns | None = None

    def num_chunks(self, num_context: int, num_tokens: int) -> int:
        """Into how many chunks a document is cut.

        Raises:
            InvalidError: the context leaves no room for a chunk, or the document is not to be cut
                and is too long.
        """
        whole = self.max_prompt_tokens // self.block_size * self.block_size
        room = min(self.chunk_tokens, whole - num_context)
        if room < 1:
            raise InvalidError(
                f"a preamble of {num_context} tokens leaves no room for documents in prompts of "
                f"{whole} tokens: shorten it",
                "preamble",
            )
        return -(-num_tokens // room)

    def num_blocks(self, num_context: int, num_tokens: int) -> int:
        """Blocks that a document takes when it is warm."""
        first = num_context // self.block_size
        lengths = lengths_of(self, num_context, num_tokens)
        return sum(-(-(num_context + length) // self.block_size) - first for length in lengths)

    def num_blocks_meanwhile(self, num_tokens: int) -> int:
        """Blocks that a document takes beside those of `num_blocks`, until it is warm."""
        return 0

    def prompts(self, context: Tokens, tokens: Tokens) -> list[Tokens]:
        """The prompts, each a whole number of blocks long; chunks differ by one token at most."""
        chunks = np.array_split(tokens, self.num_chunks(len(context), len(tokens)))
        prompts = (np.concatenate((context, chunk)) for chunk in chunks)
        return [np.pad(it, (0, -len(it) % self.block_size), "edge") for it in prompts]


def shape_for(shape: Shape, compression: CompressionSettings | None, num_context: int) -> Shape:
    """How a document is cut: its chunks fit into a prompt twice where they are compressed."""
    if compression is None:
        return shape
    whole = shape.max_prompt_tokens // shape.block_size * shape.block_size
    twice = (whole - num_context - 1) // 2
    return shape._replace(chunk_tokens=min(shape.chunk_tokens, twice))


def lengths_of(shape: Shape, num_context: int, num_tokens: int) -> list[int]:
    """Tokens of each chunk of a document."""
    chunks = shape.num_chunks(num_context, num_tokens)
    small, larger = divmod(num_tokens, chunks)
    return [small + 1] * larger + [small] * (chunks - larger)


def num_blocks(
    shape: Shape, compression: CompressionSettings | None, num_context: int, num_tokens: int
) -> int:
    """Blocks that a document takes when it is warm."""
    if compression is None:
        return shape.num_blocks(num_context, num_tokens)
    cut = shape_for(shape, compression, num_context)
    kept = (compression.count(length) for length in lengths_of(cut, num_context, num_tokens))
    return sum(-(-count // shape.block_size) for count in kept)
