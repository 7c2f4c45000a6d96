# SPDX-License-Identifier: Apache-2.0
"""A tape that records the distribution of every step, and may dictate the next token.

So one request gives the exact distributions of a policy along the answer of full prefill: the
prompt is computed as the policy says, each token of that answer is forced, and what the model would
have said instead is on the tape. The whole vocabulary is recorded, not the most likely tokens.

The engine runs in this process, so a request only has to name its tape: `Tape.extra_args`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

Logits = list[torch.Tensor]
"""`[vocabulary]` each, float32, of steps one after the other."""

EXTRA_ARG = "bench_tape"
_TAPES: WeakValueDictionary[str, Tape] = WeakValueDictionary()
_NUMBERS = count()


class Tape:
    """What one request was made to say, and what it would have said.

    Args:
        forced: tokens to say in any case; behind them, and without any, decoding is greedy.

    Attributes:
        logits: of every step so far, as the model gave them.
    """

    def __init__(self, forced: Sequence[int] = ()) -> None:
        self._forced = tuple(forced)
        self._name = f"tape-{next(_NUMBERS)}"
        self.logits: Logits = []
        _TAPES[self._name] = self

    @property
    def extra_args(self) -> Mapping[str, Any]:
        """What a request has among its `extra_args` to be recorded here."""
        return {EXTRA_ARG: self._name}

    def record(self, logits: torch.Tensor) -> None:
        """Take one step's logits `[vocabulary]`, and change them so that the forced token wins."""
        step = len(self.logits)
        self.logits.append(logits.detach().to("cpu", torch.float32, copy=True))
        if step < len(self._forced):
            logits.fill_(float("-inf"))
            logits[self._forced[step]] = 0.0


def tape_of(extra_args: Mapping[str, Any] | None) -> Tape | None:
    """The tape that a request names, if it names one that is still there."""
    return _TAPES.get((extra_args or {}).get(EXTRA_ARG, ""))


def divergences(full: Logits, other: Logits) -> list[float]:
    """Kullback-Leibler divergence of `other` from `full` at each step, in nats, whole vocabulary.

    Raises:
        ValueError: not as many steps of both.
    """
    found = []
    for ours, theirs in zip(full, other, strict=True):
        expected, given = (torch.log_softmax(one.double(), -1) for one in (ours, theirs))
        terms = expected.exp() * (expected - given)
        # A token that both give no chance at all adds 0, not 0 times infinity.
        found.append(max(0.0, float(terms.nan_to_num(0.0).sum())))
    return found


class Apart(NamedTuple):
    """How far one way to answer is from full prefill, along its answer.

    Attributes:
        first_kl: divergence of the first token's distribution, in nats.
        answer_kl: mean divergence of all.
        agreement: share of the answer's tokens that would have been chosen.
    """

    first_kl: float
    answer_kl: float
    agreement: float


def apart(full: Logits, answer: Sequence[int], other: Logits, would_say: Sequence[int]) -> Apart:
    """Of as many steps as full prefill has logits of.

    Args:
        full: of full prefill.
        answer: of full prefill, its tokens.
        other: of the other way, the same tokens forced.
        would_say: what it would have said there.
    """
    steps = len(full)
    found = divergences(full, other[:steps])
    agree = [a == b for a, b in zip(answer, would_say, strict=True)]
    return Apart(found[0], sum(found) / steps, sum(agree[:steps]) / steps)


def favourites(logits: Logits) -> list[int]:
    """The most likely token of each step."""
    return [int(one.argmax()) for one in logits]
