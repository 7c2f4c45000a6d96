# SPDX-License-Identifier: Apache-2.0
"""Where each stretch of a prompt comes from, or why nothing was found for it.

Only what the request's own namespace knows is looked at: a namespace that does not exist and one
that belongs to others give the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from segreuse_extras.explain.forgotten import Forgotten, Why, flags_of
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import indexed_windows
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import BoolArray, Check, IntArray, Pieces, Tier

Stretch = dict[str, Any]

WhyNew = Callable[[int, int], str]
"""Says why the text from one position up to another was not found."""

NOT_WORTH_IT = "not_worth_it"


def explain(
    pieces: Pieces,
    start: int,
    num_tokens: int,
    reason: WhyNew,
    new_image: int | None = None,
) -> list[Stretch]:
    """Stretches of a prompt, in order; together they are all of it.

    Args:
        pieces: what was found.
        start: tokens of vLLM's own prefix hit.
        num_tokens: of the prompt.
        reason: why text was not found.
        new_image: position of an image from which on nothing is reused; None: there is none.

    Returns:
        Each with `start` and `tokens`; `source` is `prefix`, `segment`, `similar` or `new`. A
        segment, and an equal run of similar text, has `position`, of its first token in the donor's
        own sequence, `tier` if it comes from the second tier, and `in_context` if it was computed
        behind the very text that is in front of it. New text has a `reason`; that of
        the last token, which vLLM computes, is `last_token`, and that of what begins with an image
        that is not reused wholly is `new_image`.
    """
    found = [_stretch(0, start, "prefix")] if start else []
    at, last = start, num_tokens - 1
    end = last if new_image is None else min(last, max(start, new_image))
    for first, length, source, more in [*_segments(pieces), (end, 0, "", {})]:
        if at < first:
            found.append(_stretch(at, first - at, "new", reason=reason(at, first)))
        if length:
            found.append(_stretch(first, length, source, **more))
        at = first + length
    if end < last:
        found.append(_stretch(end, last - end, "new", reason="new_image"))
    return [*found, _stretch(last, 1, "new", reason="last_token")]


def with_left_behind(stretches: Sequence[Stretch], start: int) -> list[Stretch]:
    """The same stretches; what is taken of an earlier turn is a segment of its own, and no part of
    the prefix.

    Args:
        stretches: of a prompt, a prefix first.
        start: where the exact prefix ends.
    """
    first, *others = stretches
    prefix = [_stretch(0, start, "prefix")] if start else []
    more = {"position": start, "in_context": True, "recomputed": []}
    return [*prefix, _stretch(start, first["tokens"] - start, "segment", **more), *others]


def unexplored(start: int, num_tokens: int, reason: str) -> list[Stretch]:
    """The same of a prompt in which nothing was searched for.

    Args:
        start: tokens of vLLM's own prefix hit.
        num_tokens: of the prompt.
        reason: why not.
    """
    prefix = [_stretch(0, start, "prefix")] if start else []
    return [*prefix, _stretch(start, num_tokens - start, "new", reason=reason)]


def with_recomputed(stretches: Sequence[Stretch], positions: IntArray | None) -> list[Stretch]:
    """The same stretches; those that are reused have `recomputed`: which of their tokens are
    computed again.

    Args:
        stretches: of a prompt.
        positions: of computed tokens in the prompt, ascending; None: not known, and `recomputed` is
            None.

    Returns:
        `recomputed` is a list of runs, each `[start, tokens]`.
    """
    return [
        each | {"recomputed": None if positions is None else _runs_within(each, positions)}
        if each["source"] in ("segment", "similar")
        else each
        for each in stretches
    ]


def with_acceptance(
    stretches: Sequence[Stretch], start: int, check: Check, drifts: Sequence[float]
) -> list[Stretch]:
    """The same stretches; similar ones have `boundary_drift` (None: not a number) and whether they
    were `rejected`.

    Args:
        stretches: of a prompt; each similar one is a segment, or a part of one.
        start: of the plan.
        check: the test of its similar segments.
        drifts: of each of them.
    """
    first, is_rejected = start + check.first, check.is_rejected(drifts)
    found: list[Stretch] = []
    for each in stretches:
        if each["source"] == "similar":
            segment = int(np.searchsorted(first, each["start"], side="right")) - 1
            drift, rejected = drifts[segment], bool(is_rejected[segment])
            shown = round(drift, 4) if math.isfinite(drift) else None
            each = each | {"boundary_drift": shown, "rejected": rejected}
        found.append(each)
    return found


def _runs_within(stretch: Stretch, positions: IntArray) -> list[list[int]]:
    bounds = stretch["start"], stretch["start"] + stretch["tokens"]
    within = positions[slice(*np.searchsorted(positions, bounds))]
    runs = np.split(within, np.flatnonzero(np.diff(within) != 1) + 1)
    return [[int(run[0]), len(run)] for run in runs if len(run)]


def _stretch(start: int, tokens: int, source: str, **more: Any) -> Stretch:
    return {"start": start, "tokens": tokens, "source": source, **more}


def _segments(pieces: Pieces) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    """First token, length and source of each run that was computed in one sequence and lies in one
    tier, and what else is known of it."""
    other_tier = 1 + np.flatnonzero(np.diff(pieces.source))
    begins = np.searchsorted(pieces.destination, pieces.segments(0).first)
    begins = np.union1d(begins, other_tier)
    ends = pieces.destination + pieces.length
    for begin, end in pairwise([*begins.tolist(), len(pieces)]):
        first, source = int(pieces.destination[begin]), Tier(pieces.source[begin])
        more: dict[str, Any] = {"position": int(pieces.position[begin])}
        if source != Tier.GPU:
            more["tier"] = source.name.lower()
        if pieces.in_context[begin]:
            more["in_context"] = True
        found_as = "similar" if pieces.is_similar[begin] else "segment"
        yield first, int(ends[end - 1]) - first, found_as, more


def refused_in_other_context(otherwise: WhyNew) -> WhyNew:
    """The same reasons for a request with `context=same`: what may donate, and was not found for
    it, was computed behind other text, or behind reused KV."""

    def reason(start: int, stop: int) -> str:
        why = otherwise(start, stop)
        return "other_context" if why == NOT_WORTH_IT else why

    return reason


class Unused:
    """Why text of a prompt is in no plan, although it was found.

    Args:
        pieces: what was found.
        reason: why it is not in the plan.
        otherwise: the reason for other text.
    """

    def __init__(self, pieces: Pieces, reason: str, otherwise: WhyNew) -> None:
        self._pieces = pieces
        self._reason = reason
        self._otherwise = otherwise

    def __call__(self, start: int, stop: int) -> str:
        """The reason for the text `[start, stop)`, none of which is in the plan."""
        begins, ends = self._pieces.destination, self._pieces.destination + self._pieces.length
        if ((begins < stop) & (ends > start)).any():
            return self._reason
        return self._otherwise(start, stop)


class Reasons:
    """Why text of a prompt is not reused by its content.

    - `shorter_than_block`: only whole KV blocks are found.
    - `computed_now`: it is being computed in this very step.
    - `not_worth_it`: it may donate, and is computed all the same.
    - `evicted`: it was known, and its blocks were taken for other text.
    - `too_deep`: it was only computed behind too much reused KV (`max_provenance_depth`).
    - `other_adapter`: it is cached in this namespace, as computed with another LoRA adapter.
    - `unknown`: it was never seen in this namespace, or long ago.

    Args:
        prompt: what was searched for.
        index: where.
        forgotten: what was there before.
        other_adapters: ids of the namespaces that differ from the prompt's own by the adapter only.
    """

    def __init__(
        self,
        prompt: Prompt,
        index: SegmentIndex,
        forgotten: Forgotten,
        other_adapters: Sequence[int] = (),
    ) -> None:
        self._prompt, self._index, self._forgotten = prompt, index, forgotten
        self._other_adapters = other_adapters
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
            oldest = self._indexed(self._prompt.namespace)
            is_known = oldest >= 0
            is_fresh = is_known & (self._index.nodes["born"][oldest] == self._index.step)
            forgotten = self._forgotten.windows(self._prompt)
            keys = self._prompt.hashes(self._index.block_size).astype(np.uint32)
            gone = self._index.known.keys_of_gone(self._prompt.namespace)
            ones = np.ones(gone.size, np.uint8)
            shared = flags_of(keys.astype(np.uint64), gone.astype(np.uint64), ones) > 0
            elsewhere = np.zeros_like(is_known)
            for namespace in self._other_adapters:
                elsewhere |= self._indexed(namespace) >= 0
            self._by_reason = {
                "computed_now": is_fresh,
                NOT_WORTH_IT: is_known & ~is_fresh,
                "evicted": forgotten[Why.EVICTED] | shared,
                "too_deep": forgotten[Why.TOO_DEEP],
                "other_adapter": elsewhere,
            }
        return self._by_reason

    def _indexed(self, namespace: int) -> IntArray:
        """The oldest entry of a namespace with the content of each window of the prompt; -1: there
        is none."""
        index, prompt = self._index, self._prompt
        hashes, length = prompt.hashes(index.block_size), len(prompt.tokens)
        return indexed_windows(index, namespace, prompt.tokens, hashes, 0, length)
