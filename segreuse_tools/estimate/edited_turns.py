# SPDX-License-Identifier: Apache-2.0
"""How prompts go on with the one before of their session: with more text behind it, or edited.

before     S a b c d             blocks; S: the system prompt
now        S a b c d e f         more text
now        S x b c d e f         edited: b to d are still there, and no prefix any more
now        S p q r               another conversation, or too little is left to tell
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from segreuse_tools.estimate.block_cache import Sent
from vllm_segreuse.cache.rolling_hash import HashArray

_MOST_SESSIONS = 1 << 14
FEWEST_TOKENS = 256
"""Behind an edit, that are found again: fewer may be a phrase that two texts share."""


@dataclass
class EditedTurns:
    """Prompts of a log that have one before in their session.

    Attributes:
        later: all of them.
        appended: those that begin with the one before, but for its last block.
        edited: those that do not, and still hold text that stood behind the place.
        behind_tokens: of edited prompts, behind the place: prefix caching finds none of them.
        kept_tokens: of these, in blocks of the prompt before that are found in this one.
    """

    later: int = 0
    appended: int = 0
    edited: int = 0
    behind_tokens: int = 0
    kept_tokens: int = 0


class _Before(NamedTuple):
    """Blocks of a prompt: hashes of all up to their ends, and of their own tokens; and the tokens
    behind them."""

    names: HashArray
    contents: HashArray
    end: bytes


class SessionPrompts:
    """The last prompt of each session.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.turns = EditedTurns()
        self._size = block_size
        self._last: OrderedDict[tuple[str, int | None], _Before] = OrderedDict()

    def run(self, session: str | None, sent: Sent) -> None:
        """One more prompt; None: of no session."""
        if session is None or not len(sent.names):
            return
        key = session, sent.namespace
        before = self._last.pop(key, None)
        names = np.asarray(sent.names, np.uint64)
        end = sent.tokens[len(names) * self._size :].tobytes()
        # A copy: a view would keep the hash of every window.
        self._last[key] = _Before(names, sent.hashes[:: self._size].copy(), end)
        if len(self._last) > _MOST_SESSIONS:
            self._last.popitem(last=False)
        if before is None or (np.array_equal(before.names, names) and before.end == end):
            return  # sent again, or another answer to it: no turn
        self._compare(before, names, sent)

    def _compare(self, before: _Before, names: HashArray, sent: Sent) -> None:
        turns, count = self.turns, min(len(before.names), len(names))
        turns.later += 1
        differs = np.flatnonzero(before.names[:count] != names[:count])
        shared = int(differs[0]) if differs.size else count
        # The last block may end with what asks for an answer.
        if shared >= max(1, len(before.names) - 1):
            turns.appended += 1
            return
        gone = before.contents[shared:]
        kept = int(np.isin(gone, sent.hashes[shared * self._size :]).sum()) * self._size
        if kept >= FEWEST_TOKENS:
            turns.edited += 1
            turns.behind_tokens += len(sent.tokens) - shared * self._size
            turns.kept_tokens += kept
