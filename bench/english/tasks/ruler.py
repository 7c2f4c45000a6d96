# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks (Hsieh et al. 2024) in English, cut into documents.

Needles (several asked for at once, or several values of one), variable tracking, common words and
frequent words: with the paper's wording, fewer and shorter names, so that answers fit into 64
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from bench.english import text
from bench.english.tasks.base import OTHERS, Example, Layout, split
from bench.english.text import Measure

ASKED = 4
"""Needles that are asked for at once, and words that are common."""
HOPS = 3
RARE_WORDS = 30
RARE_SHARE = 1 / 3
"""How often a rare word comes for each time that a common one does."""
FREQUENCIES = [1 / rank**2 for rank in range(1, 9)]
"""Zipf's law with exponent 2, as in RULER."""
ANSWER_TOKENS = 64


def needles(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """Numbers hidden in text, some of which are asked for in one question."""
    count = max(2 * ASKED, layout.total)
    names = _names(rng, count)
    codes = text.numbers(rng, count)
    facts = list(map(_fact, names, codes))
    documents, others = split(_strewn(rng, facts, layout, measure))
    shown = [i for i, fact in enumerate(facts) if any(fact in document for document in documents)]
    asked = rng.sample(shown, ASKED)
    listed = ", ".join(names[i] for i in asked)
    return Example(
        "needles",
        kind,
        documents,
        others,
        f"What are the special magic numbers for {listed} mentioned in the text above? "
        "Answer with the numbers only, in this order.",
        tuple(codes[i] for i in asked),
        answer_tokens=ANSWER_TOKENS,
    )


def values(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """All numbers that one name has, which are told in different places; others have one each."""
    asked, *names = _names(rng, 1 + layout.total)
    codes = text.numbers(rng, ASKED + layout.total)
    inside = [[_fact(*one)] for one in zip(names, codes[ASKED:], strict=True)]
    for code in codes[:ASKED]:
        inside[rng.randrange(layout.count)].append(_fact(asked, code))
    documents, others = split(
        [text.document(rng, facts, layout.tokens, measure) for facts in inside]
    )
    return Example(
        "multi-value",
        kind,
        documents,
        others,
        f"What are all the special magic numbers for {asked} mentioned in the text above? "
        f"There are {ASKED}. Answer with the numbers only.",
        tuple(codes[:ASKED]),
        answer_tokens=ANSWER_TOKENS,
    )


def variables(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """All variables that hold a value, which is handed on from one to the next."""
    chains = 3
    names = _codes(rng, chains * (HOPS + 1))
    values = text.numbers(rng, chains, digits=5)
    threads = []
    for chain, value in enumerate(values):
        mine = names[chain * (HOPS + 1) :][: HOPS + 1]
        lines = [f"VAR {mine[0]} = {value}."]
        lines += [f"VAR {b} = VAR {a}." for a, b in pairwise(mine)]
        threads.append(lines)
    inside: list[list[str]] = [[] for _ in range(layout.total)]
    for lines in threads:
        # The chain that is asked for lies in the prompt's documents, each step behind the last.
        for where, line in zip(
            sorted(rng.choices(range(layout.count), k=len(lines))), lines, strict=True
        ):
            inside[where].append(line)
    for document in inside[layout.count :]:
        (unused,) = _codes(rng, 1)
        document.append(f"VAR {unused} = {rng.randrange(10**4, 10**5)}.")
    documents, others = split(
        [text.document(rng, facts, layout.tokens, measure) for facts in inside]
    )
    return Example(
        "variables",
        kind,
        documents,
        others,
        f"Question: Find all variables that are assigned the value {values[0]} in the text above, "
        f"directly or through other variables. There are {HOPS + 1}. Answer with their names only.",
        tuple(names[: HOPS + 1]),
        answer_tokens=ANSWER_TOKENS,
    )


def common(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """The words that come most often in lists of words."""
    words = rng.sample(text.THINGS, ASKED + RARE_WORDS)
    each = measure(_numbered(words)) / len(words)
    entries = layout.tokens / each
    per_common = ASKED + RARE_WORDS * RARE_SHARE

    def lists(count: int) -> list[str]:
        times = max(2, round(count * entries / per_common))
        rare = max(1, int(times * RARE_SHARE))
        return _dealt(rng, words[:ASKED] * times + words[ASKED:] * rare, count, _numbered, "Words:")

    return Example(
        "common",
        kind,
        tuple(lists(layout.count)),
        tuple(lists(OTHERS)),
        f"Question: What are the {ASKED} most common words in the above lists? "
        "Answer with the words only.",
        tuple(words[:ASKED]),
        answer_tokens=ANSWER_TOKENS,
    )


def frequent(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """The three most frequent of coded words, whose numbers follow Zipf's law."""
    codes = [name.lower() for name in _codes(rng, len(FREQUENCIES))]
    each = sum(
        measure(f" {code}") * share for code, share in zip(codes, FREQUENCIES, strict=True)
    )  # of `sum(FREQUENCIES)` words

    def coded(count: int) -> list[str]:
        whole = count * layout.tokens / each
        times = [max(1, round(whole * share)) for share in FREQUENCIES]
        pool = [code for code, number in zip(codes, times, strict=True) for _ in range(number)]
        return _dealt(rng, pool, count, " ".join, "Coded text:")

    return Example(
        "frequent",
        kind,
        tuple(coded(layout.count)),
        tuple(coded(OTHERS)),
        "Question: What are the three most frequently appeared words in the above coded text? "
        "Answer with the words only.",
        tuple(codes[:3]),
        answer_tokens=ANSWER_TOKENS,
    )


def _strewn(rng: Random, facts: Sequence[str], layout: Layout, measure: Measure) -> list[str]:
    """Facts over documents, at least one in each."""
    where = [*range(layout.total), *rng.choices(range(layout.total), k=len(facts) - layout.total)]
    inside: list[list[str]] = [[] for _ in range(layout.total)]
    for document, fact in zip(where, facts, strict=True):
        inside[document].append(fact)
    return [text.document(rng, mine, layout.tokens, measure) for mine in inside]


def _dealt(
    rng: Random, pool: list[str], count: int, write: Callable[[Sequence[str]], str], title: str
) -> list[str]:
    """All words, in any order, over so many documents."""
    rng.shuffle(pool)
    return [text.close(write(pool[start::count]), title) for start in range(count)]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _names(rng: Random, count: int) -> list[str]:
    """Different names of two words."""
    traits, things = rng.choices(text.TRAITS, k=count), rng.sample(text.THINGS, count)
    return [f"{trait}-{thing}" for trait, thing in zip(traits, things, strict=True)]


def _fact(name: str, code: str) -> str:
    return f"One of the special magic numbers for {name} is: {code}."


def _codes(rng: Random, count: int) -> list[str]:
    """Different names of three letters that are no words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=3))] = None
    return list(found)
