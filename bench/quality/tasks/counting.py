# SPDX-License-Identifier: Apache-2.0
"""RULER's common words (equally frequent, among rare ones) and frequent words (Zipf's law)."""

from __future__ import annotations

from random import Random

from bench.quality import language
from bench.quality.tasks.base import Names, Question, Statement, Thread


def common(names: Names, rng: Random, words: int, times: int, rare: int) -> Thread:
    """`item c07` lines: `words` of them come `times` times, `rare` others once.

    The answer lists the common ones in the order of the vocabulary.
    """
    chosen = names.take(language.CODES, words + rare)
    often, seldom = chosen[:words], chosen[words:]
    lines = often * times + seldom
    rng.shuffle(lines)
    answer = (*sorted(often), ".")
    return Thread(
        tuple(Statement(("item", line)) for line in lines),
        (Question("common", ("?", "common", ":"), answer),),
    )


def frequent(names: Names, rng: Random, counts: list[int], asked: int) -> Thread:
    """Code words strewn over the text, the i-th as often as `counts[i]`, which must fall.

    The answer lists the `asked` most frequent ones, the most frequent first.
    """
    codes = names.take(language.CODES, len(counts))
    text = [code for code, count in zip(codes, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    return Thread(
        tuple(Statement((code,)) for code in text),
        (Question("frequent", ("?", "frequent", ":"), (*codes[:asked], ".")),),
    )
