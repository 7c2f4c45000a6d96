# SPDX-License-Identifier: Apache-2.0
"""What each policy is, written down from its paper for one token at a time.

A prompt is a string of one letter per token: `N` is new, `R` reused; `S` and `A` are reused and the
first of a segment, which was computed behind other text, or alone. Nothing here calls what it is
compared with.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

TAIL = 64
QUESTION = 256
LEAST_SHARE = 0.05
"""`peaks`: a twentieth of a head's attention."""
FIRST_OF_SEGMENT = "SA"


@dataclass
class Definition:
    """What is computed.

    Attributes:
        always: positions that are computed whatever the scores say.
        dense: leading layers that compute every token.
        at_most: tokens that are chosen by their score.
        probes: positions whose queries give the scores.
        score: what the choice goes by, in a word.
        least_share: what a score must be.
        from_layer: the first layer whose attention counts.
    """

    always: set[int]
    dense: int = 0
    at_most: int = 0
    probes: frozenset[int] = frozenset()
    score: str = "none"
    least_share: float = 0.0
    from_layer: int = 0


def new_tokens(prompt: str) -> set[int]:
    return {i for i, kind in enumerate(prompt) if kind == "N"}


def share_of(ratio: float, count: int) -> int:
    """That share of so many, to the nearest; halves to the even one, as Python rounds."""
    product = ratio * count
    below = math.floor(product)
    rest = product - below
    return below + int(rest > 0.5 or (rest == 0.5 and below % 2 == 1))


def asked_for(prompt: str, ratio: float) -> int:
    return share_of(ratio, sum(kind != "N" for kind in prompt))


def reused_tail(prompt: str) -> set[int]:
    """SparseX, 3.2: the last 64 tokens, if none of them has a query of its own."""
    tail = range(max(len(prompt) - TAIL, 0), len(prompt))
    return set() if any(prompt[i] == "N" for i in tail) else set(tail)


def shift(prompt: str) -> Definition:
    """Naive reuse."""
    return Definition(new_tokens(prompt))


def exact(prompt: str) -> Definition:
    """The holes."""
    return Definition(new_tokens(prompt))


def epic(prompt: str, ratio: float) -> Definition:
    """EPIC, LegoLink: the first tokens of every segment."""
    always = new_tokens(prompt)
    for first, kind in enumerate(prompt):
        if kind in FIRST_OF_SEGMENT:
            end = first + 1
            while end < len(prompt) and prompt[end] == "R":
                end += 1
            always |= set(range(first, first + share_of(ratio, end - first)))
    return Definition(always)


def sparsex(
    prompt: str, ratio: float, dense: int | float, overflow: int | None, block: int, layers: int
) -> Definition:
    """SparseX, algorithm 1, lines 11 to 17."""
    new, tail = new_tokens(prompt), reused_tail(prompt)
    boundary = min(max(share_of(dense, layers), 1) if 0 < dense < 1 else int(dense), layers)
    if boundary == layers:  # every token at every layer
        return Definition(set(range(len(prompt))), boundary, 0, frozenset(new | tail), "boundary")
    width = block if overflow is None else overflow
    beside = set()
    for i in new:  # line 15: on both sides of every interval
        beside |= set(range(max(i - width, 0), min(i + width + 1, len(prompt))))
    always = new | beside | tail  # line 17, without the key tokens of line 14
    at_most = min(asked_for(prompt, ratio), len(prompt) - len(always))
    return Definition(always, boundary, at_most, frozenset(new | tail), "boundary")


def cacheblend(prompt: str, ratio: float, dense: int | float, layers: int) -> Definition:
    """CacheBlend: the first layer for every token, compared at the second."""
    boundary = 1 if dense < 1 else min(int(dense), layers - 1)
    new = frozenset(new_tokens(prompt))
    return Definition(set(new), boundary, asked_for(prompt, ratio), new, "deviation")


def question(prompt: str) -> set[int]:
    """The last interval of new tokens, as much of its end as is read; or the tail."""
    if reused_tail(prompt):
        return reused_tail(prompt)
    found: set[int] = set()
    for i in sorted(new_tokens(prompt), reverse=True):
        if len(found) == QUESTION or (found and i != min(found) - 1):
            break
        found.add(i)
    return found


def at_once(found: Definition, prompt: str) -> Definition:
    """Where everything is chosen, nothing is: all tokens are computed."""
    if found.at_most and not found.least_share and len(found.always) + found.at_most == len(prompt):
        return Definition(set(range(len(prompt))))
    return found


def prophet(prompt: str, ratio: float) -> Definition:
    """ProphetKV: what the question attends to, summed over heads and layers."""
    return at_once(by_the_question(prompt, ratio), prompt)


def by_the_question(prompt: str, ratio: float) -> Definition:
    """What all such policies have in common."""
    asking = question(prompt)
    always = new_tokens(prompt) | asking
    at_most = min(asked_for(prompt, ratio), len(prompt) - len(always))
    return Definition(always, 0, at_most, frozenset(asking), "sum")


def peaks(prompt: str, ratio: float) -> Definition:
    """The same by the peak, and only what gets enough of it; everything, if that is asked for."""
    found = by_the_question(prompt, ratio)
    found.score, found.least_share = "peak", 0.0 if ratio == 1 else LEAST_SHARE
    return at_once(found, prompt)


def segments(prompt: str) -> list[str]:
    """The reused tokens of each segment."""
    found: list[str] = []
    for kind in prompt:
        if kind in FIRST_OF_SEGMENT:
            found.append("")
        if kind != "N":
            found[-1] += kind
    return found


def focus(prompt: str, ratio: float | None, layers: int) -> Definition:
    """The same by what all queries pay and by what the last ones do, in the second half of the
    layers; without a ratio, tokens and a share of each segment, by where it was computed."""
    found = by_the_question(prompt, 1.0 if ratio is None else ratio)
    if ratio is None:
        behind = alone = Fraction(0)
        for one in segments(prompt):
            third = Fraction(len(one), 3)
            if one[0] == "A":
                alone += min(13, third) + Fraction(8 * len(one), 100)
            else:
                behind += min(12, third) + Fraction(4 * len(one), 100)
        found.at_most = min(round(max(70, behind) + alone), len(prompt) - len(found.always))
    found.score, found.from_layer = "both", layers // 2
    return at_once(found, prompt)
