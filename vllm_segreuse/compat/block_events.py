# SPDX-License-Identifier: Apache-2.0
"""What the block pool reports to those who keep something by block, and what it asks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class NamedBlocks(NamedTuple):
    """Consecutive full blocks of a request that vLLM has just named.

    Attributes:
        request_id: whose blocks they are.
        first: index of the first of them among the request's blocks.
        block_ids: their ids, in order.
        parent: id of the block before them; -1: they are the first.
        token_ids: all tokens of the request.
    """

    request_id: str
    first: int
    block_ids: list[int]
    parent: int
    token_ids: Sequence[int]


class BlockListener:
    """Override what is of interest. Called in the scheduler's thread, one listener after the other;
    no error may leave it.

    The content of an evicted block stays until the next step overwrites it.
    """

    def named(self, blocks: NamedBlocks) -> None:
        """Blocks of a request with extra keys got their names; their KV may not be there before the
        next step."""

    def evicting(self, block_ids: Sequence[int]) -> None:
        """vLLM is about to take these blocks, in this order, for other tokens. They have their
        names and their content still; those that have names lose them next (`evicted`)."""

    def evicted(self, block_ids: Sequence[int]) -> None:
        """Blocks lost their names, in this order."""

    def starving(self, request_id: str) -> None:
        """No request has blocks, and this one has no room: release what is held for others."""

    def resetting(self) -> None:
        """All names are about to be removed, which fails while anybody holds a block."""

    def reset(self) -> None:
        """All names were removed."""


class Naming(Protocol):
    """How far the KV of requests is that of their own tokens. Only such blocks get exact names."""

    def exact_ends(self, request_id: str) -> tuple[int, int] | None:
        """Tokens up to which full blocks are exact: as far as is known, and if what is being
        restored is in place; None: the request has nothing to do with reuse, and all are."""

    def restoration(self, request_id: str) -> int:
        """Number of the restoration that the second of these ends depends on."""

    def exact_stop(self, request_id: str) -> int:
        """Behind this position the request's tokens stand for other KV, and its prefix hit ends."""

    def left_behind(self, request_id: str, start: int, stop: int) -> Sequence[int]:
        """Blocks behind a request's prefix hit that it takes as they are, although they are not
        exact: consecutive ones from token `start` on, which end at `stop` at the latest. Called
        with each lookup of a prefix hit; the last answer counts."""

    def written_until(self, request_id: str) -> int:
        """Tokens of a request for which slots are written before its first step is over, also of
        text that vLLM computes in a later step; 0: vLLM knows of all."""

    def allocation_failed(self, request_id: str, blocks: int) -> None:
        """A request was not allocated, for want of so many blocks, although no other holds any."""


class AdmissionState(Protocol):
    """Whether a scheduling step still admits requests."""

    @property
    def closed(self) -> bool:
        """Whether no further request may be admitted in this step."""


class PrefixState(NamedTuple):
    """vLLM's own prefix hit of a request.

    Attributes:
        fresh: a block of it was hashed in this very step, so its KV is not there yet.
        blocks_needed: blocks vLLM must still take from the free queue to run the request.
        idle: those of them that are the prefix hit's own: as donors they take no others.
    """

    fresh: bool
    blocks_needed: int
    idle: Collection[int] = ()


class SiblingBlocks(Protocol):
    """Which blocks of other KV cache groups hold the same tokens as one of the group that segments
    are found in."""

    def note(self, block_ids: Sequence[int], others: Sequence[Sequence[int]]) -> None:
        """Blocks were filled together with as many in each other group; below 0: there is none."""

    def all_of(self, block_ids: Iterable[int]) -> list[int]:
        """The siblings of some blocks, as far as all of a block's are there."""

    def are_whole(self, block_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool `[blocks]`: which blocks have all of their siblings."""

    def lost(self, block_ids: Sequence[int]) -> list[int]:
        """Blocks hold something else from now on; which others were whole until then."""

    def clear(self) -> None:
        """Nothing is known of any block."""
