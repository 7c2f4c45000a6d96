# SPDX-License-Identifier: Apache-2.0
"""Where each stretch of a prompt comes from, or why nothing was found for it.

Only what the request's own namespace knows is looked at: a namespace that does not exist and one
that belongs to others give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vllm_segreuse.cache.forgotten import Forgotten, Why
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import indexed_windows
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import BoolArray, Pieces

Stretch = dict[str, Any]


def explain(
    pieces: Pieces, start: int, num_tokens: int, reason: Callable[[int, int], str]
) -> list[Stretch]:
    """Stretches of a prompt, in order; together they are all of it.

    Args:
        pieces: what was found.
        start: tokens of vLLM's own prefix hit.
        num_tokens: of the prompt.
        reason: why the text from one position up to another was not found.

    Returns:
        Each with `start` and `tokens`; `source` is `prefix`, `segment` or `new`. A segment has
        `position`, of its first token in the donor's own sequence, and new text a `reason`. That of
        the last token, which vLLM computes, is `last_token`.
    """
    found = [_stretch(0, start, "prefix")] if start else []
    at, last = start, num_tokens - 1
    for first, length, position in [*_segments(pieces), (last, 0, 0)]:
        if at < first:
            found.append(_stretch(at, first - at, "new", reason=reason(at, first)))
        if length:
            found.append(_stretch(first, length, "segment", position=position))
        at = first + length
    return [*found, _stretch(last, 1, "new", reason="last_token")]


def unexplored(start: int, num_tokens: int, reason: str) -> list[Stretch]:
    """The same of a prompt in which nothing was searched for.

    Args:
        start: tokens of vLLM's own prefix hit.
        num_tokens: of the prompt.
        reason: why not.
    """
    prefix = [_stretch(0, start, "prefix")] if start else []
    return [*prefix, _stretch(start, num_tokens - start, "new", reason=reason)]


def _stretch(start: int, tokens: int, source: str, **more: Any) -> Stretch:
    return {"start": start, "tokens": tokens, "source": source, **more}


def _segments(pieces: Pieces) -> Iterator[tuple[int, int, int]]:
    """First token, length and position of each run that was computed in one sequence."""
    firsts, positions = pieces.segments(0)
    ends = pieces.destination + pieces.length
    bounds = np.append(np.searchsorted(pieces.destination, firsts), len(pieces))
    for i, (first, position) in enumerate(zip(firsts, positions, strict=True)):
        yield int(first), int(ends[bounds[i + 1] - 1] - first), int(position)


class Reasons:
    """Why text of a prompt was not found by its content.

    - `shorter_than_block`: only whole KV blocks are found.
    - `computed_now`: it is being computed in this very step.
    - `evicted`: it was known, and its blocks were taken for other text.
    - `too_deep`: it was only computed behind too much reused KV (`max_provenance_depth`).
    - `unknown`: it was never seen in this namespace, or long ago.

    Args:
        prompt: what was searched for.
        index: where.
        forgotten: what was there before.
    """

    def __init__(self, prompt: Prompt, index: SegmentIndex, forgotten: Forgotten) -> None:
        self._prompt, self._index, self._forgotten = prompt, index, forgotten
        self._by_reason: dict[str, BoolArray] | None = None

    def __call__(self, start: int, stop: int) -> str:
        """The nearest reason for the text `[start, stop)`."""
        windows = slice(start, stop - self._index.block_size + 1)
        if windows.start >= windows.stop:
            return "shorter_than_block"
        for reason, known in self._known().items():
            if known[windows].any():
                return reason
        return "unknown"

    def _known(self) -> dict[str, BoolArray]:
        """By reason, the windows of the prompt that it holds for; the nearest first."""
        if self._by_reason is None:
            index, prompt = self._index, self._prompt
            hashes, length = prompt.hashes(index.block_size), len(prompt.tokens)
            indexed = indexed_windows(index, prompt.namespace, prompt.tokens, hashes, 0, length)
            forgotten = self._forgotten.windows(prompt)
            self._by_reason = {
                "computed_now": indexed >= 0,  # not found: it may not donate yet
                "evicted": forgotten[Why.EVICTED],
                "too_deep": forgotten[Why.TOO_DEEP],
            }
        return self._by_reason
