# SPDX-License-Identifier: Apache-2.0
"""How far what a server says under an arm is from what it says by full prefill."""

from __future__ import annotations

import math
from collections.abc import Mapping

MOST_LOGPROBS = 1000
"""Tokens that a server names of a distribution."""

Likeliest = Mapping[str, float]
"""Natural logarithms of probabilities, by token, of the likeliest tokens."""


def divergence(full: Likeliest, mine: Likeliest) -> float:
    """Kullback-Leibler divergence of a distribution from full prefill's, in nats.

    Tokens that are not among the likeliest of both count as one, so it is never more than over the
    whole vocabulary; with `MOST_LOGPROBS` tokens it is hardly less.
    """
    common = full.keys() & mine.keys()
    apart = sum(math.exp(full[token]) * (full[token] - mine[token]) for token in common)
    rest, my_rest = (1 - sum(math.exp(of[token]) for token in common) for of in (full, mine))
    if rest > 0 and my_rest > 0:
        apart += rest * math.log(rest / my_rest)
    return max(0.0, apart)
