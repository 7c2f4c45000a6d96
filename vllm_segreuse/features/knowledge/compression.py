# SPDX-License-Identifier: Apache-2.0
"""How a document is compressed: the share of its tokens that is kept, and what says which."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Self, get_args

from vllm_segreuse.features import having
from vllm_segreuse.features.knowledge.schemas import Scorer

NO_COMPRESSOR = (
    "no feature of this server compresses documents: list segreuse_extras.compressed in "
    "vllm_segreuse.features.FEATURES, or add the document without keep"
)


def compressor() -> Callable[..., Awaitable[tuple[Any, bool]]] | None:
    """What compresses a part of a document (`compress.py` of a feature); None: nothing does."""
    return next((module.compress for module in having("compress")), None)


def why_not_compressed(stages: int) -> str | None:
    """Why an engine of so many pipeline stages compresses no documents; None: it does."""
    if stages > 1:
        return f"pipeline_parallel_size={stages} does not compress documents: add it without keep"
    return NO_COMPRESSOR if compressor() is None else None


class CompressionSettings(NamedTuple):
    """How a document is compressed.

    Attributes:
        keep: share of its tokens that is kept, above 0, at most 1.
        scorer: says which.
    """

    keep: float
    scorer: Scorer

    @classmethod
    def decode(cls, text: str) -> Self | None:
        """What `encode` wrote; None for no text, or any other."""
        try:
            keep, scorer = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return None
        is_sound = isinstance(keep, float) and 0 < keep <= 1 and scorer in get_args(Scorer)
        return cls(keep, scorer) if is_sound else None

    def encode(self) -> str:
        """As text, for the manifest."""
        return json.dumps([float(self.keep), self.scorer])

    def count(self, num_tokens: int) -> int:
        """How many of so many tokens are kept."""
        return min(num_tokens, max(1, math.ceil(round(self.keep * num_tokens, 6))))
