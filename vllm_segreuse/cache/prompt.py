# SPDX-License-Identifier: Apache-2.0
"""A request's tokens, as finders search for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.rolling_hash import HashArray, window_hashes
from vllm_segreuse.plan import IntArray


class Memo(NamedTuple):
    """Matches, and what they hold for: start, stop and the index's version."""

    key: tuple[int, int, int]
    matches: Matches


def none_resident(first: int, last: int) -> IntArray:
    """No block is resident under an exact name."""
    return np.full(last - first, -1, np.int32)


def no_names(first: int, last: int) -> Sequence[bytes]:
    """Blocks have no names."""
    return ()


def no_contexts(blocks: IntArray) -> npt.NDArray[np.uint64]:
    """Nothing is known of what is in front of blocks."""
    return np.zeros(len(blocks), np.uint64)


@dataclass
class Prompt:
    """What is known of it, and what was computed of it.

    Attributes:
        namespace: id in the `NamespaceTable`.
        tokens: int32 `[n]`, all tokens known so far.
        resident_blocks: the blocks `[first, last)` of the prompt: int32 `[last - first]`, ids of
            those that are resident under the request's own exact names, or of their records in the
            second tier, else -1.
        names: of the full blocks `[first, last)` of the prompt, as far as there are any: vLLM's
            chained hashes, of all tokens up to their ends.
        contexts: of blocks of the prompt, by their indices (see `contexts.py`).
        images: of the prompt, whose tokens have ids of their own (`images.py`); None: it has none.
        slots: where tokens that are equal to the prompt's first ones may be in similar text (see
            `segreuse_extras/similar/store.py`); None: nothing was searched for. Kept with other
            tokens, since each is compared again.
        memo: what was found last, where that may be found again.
    """

    namespace: int
    tokens: IntArray
    resident_blocks: Callable[[int, int], IntArray] = none_resident
    names: Callable[[int, int], Sequence[bytes]] = no_names
    contexts: Callable[[IntArray], npt.NDArray[np.uint64]] = no_contexts
    images: PromptImages | None = None
    slots: IntArray | None = field(default=None, repr=False)
    memo: Memo | None = field(default=None, init=False, repr=False)
    _hashes: HashArray | None = field(default=None, init=False, repr=False)

    def hashes(self, width: int) -> HashArray:
        """Hash of every window of `width` tokens, a block's number; computed once."""
        if self._hashes is None:
            self._hashes = window_hashes(self.tokens, width)
        return self._hashes

    def whole(self, block_size: int) -> tuple[int, bytes, bytes]:
        """What equal prompts have in common: namespace, name of the last full block (b"": none has
        one), which covers all in front of it, salt, adapter and images, and the tokens behind."""
        names = self.names(0, len(self.tokens) // block_size)
        behind = self.tokens[len(names) * block_size :].tobytes()
        return self.namespace, names[-1] if names else b"", behind

    def with_tokens(self, tokens: IntArray) -> Prompt:
        """The same request once it has other tokens, placeholders of images among them; of what was
        computed only slots are kept."""
        return replace(self, tokens=tokens if self.images is None else self.images.keyed(tokens))
