# SPDX-License-Identifier: Apache-2.0
"""A request of a trace: what its prompt is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from vllm_segreuse.plan import IntArray


class Kind(StrEnum):
    """What a part of a prompt is."""

    SYSTEM = "system"
    PASSAGE = "passage"
    HISTORY = "history"
    SEARCH = "search"
    QUESTION = "question"
    BLOCK = "block"
    """So many tokens, whatever they are."""


class PromptPart(NamedTuple):
    """A run of tokens. Parts with equal ids and lengths are equal text.

    Attributes:
        id: below 2**63.
        tokens: at least 1.
        kind: what it is.
    """

    id: int
    tokens: int
    kind: Kind = Kind.BLOCK


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        where: file and number of the line, for messages.
        parts: of the prompt, in order; at least one.
        output_tokens: that were generated; their text is in no prompt.
        time_s: when it was sent, in seconds since any moment; None: not logged.
        session: of the user or conversation; None: not logged.
    """

    where: str
    parts: tuple[PromptPart, ...]
    output_tokens: int
    time_s: float | None
    session: str | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(part.tokens for part in self.parts)

    @property
    def documents(self) -> list[int]:
        """Ids of the passages; of all parts, where none is one."""
        passages = [part.id for part in self.parts if part.kind is Kind.PASSAGE]
        return passages or [part.id for part in self.parts]


_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TOKEN_BITS = np.uint64(33)  # of 64; 31 are left


def tokens_of(parts: tuple[PromptPart, ...]) -> IntArray:
    """Token ids that stand for the parts, int32 `[tokens]`: equal parts give equal tokens, and a
    window of a few tokens of one part is found in no other."""
    lengths = np.fromiter((part.tokens for part in parts), np.int64, len(parts))
    ids = np.fromiter((part.id for part in parts), np.uint64, len(parts))
    first = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum(), dtype=np.uint64) - np.repeat(first, lengths).astype(np.uint64)
    return (mixed_ids(np.repeat(ids, lengths), within) >> _TOKEN_BITS).astype(np.int32)


def mixed_ids(ids: np.ndarray, within: np.ndarray) -> np.ndarray:
    """A number of 64 bits for each place in each part.

    Args:
        ids: uint64 `[n]`, of the parts.
        within: uint64 `[n]`, the places in them.
    """
    return _mix(_mix(ids * _GOLDEN) + within * _GOLDEN)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return np.asarray(values ^ (values >> np.uint64(31)))
