# SPDX-License-Identifier: Apache-2.0
"""English text for documents: paragraphs by people, and names that are drawn.

The paragraphs are those of Python's own reference documentation (`pydoc_data.topics`, PSF licence
version 2), which ships with the interpreter; names and sentences of facts are our own. Nothing is
downloaded. The paragraphs change with Python's version: `digest` is kept with the results.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from random import Random

from bench import shapes

Measure = Callable[[str], int]
"""Tokens of a text."""

SHORTEST_TOKENS = 60
LONGEST_TOKENS = 1000
"""Of a document."""
_LAST_TRIES = 60


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN = _words(
    """
    Alice Anna Beatrix Carla Clara Diana Elena Emma Fiona Freya Greta Helen Ingrid Irene Julia
    Karen Laura Lucia Maria Nadia Nora Olga Paula Rosa Sofia Tessa Ursula Vera Wanda Zoe
    """
)
MEN = _words(
    """
    Adam Arthur Boris Bruno Carl Daniel David Edgar Farid Felix Georg Hugo Ivan Jonas Kevin
    Leon Lucas Martin Miles Nils Oscar Pablo Peter Ralph Simon Thomas Umar Victor Walter
    Xavier
    """
)
FAMILIES = _words(
    """
    Abbott Becker Castle Dawson Ekberg Fischer Garner Haddad Irving Jensen Keller Lindqvist
    Moreau Novak Okafor Petrov Quinn Rossi Silva Tanaka Ullman Vargas Weber Yilmaz Zimmer
    Arden Bishop Cooper Duarte Evans Forster Grant Hollis Ibsen Jarvis Kovac Lambert
    """
)
CITIES = _words(
    """
    Lisbon Oslo Vienna Dublin Prague Athens Riga Porto Geneva Turin Bergen Gdansk Malmo Lyon
    Bilbao Ghent Krakow Split Tartu Basel Utrecht Leeds Cork Nantes Graz Bremen Aarhus Tampere
    Verona Seville Bruges Brno Kiel Varna Zagreb Rouen
    """
)
THINGS = _words(
    """
    anchor basket candle drum engine feather garden hammer island jacket kettle ladder mirror
    needle orchard pencil quarry ribbon saddle tunnel umbrella valley window yacht zipper
    blanket compass dragon falcon glacier harbor igloo jungle kitchen lantern magnet notebook
    oyster pillow rocket shelter tractor violin walnut beacon cactus dolphin emerald fountain
    guitar helmet insect jewel kingdom lemon meadow napkin ocean parrot quilt river spoon
    temple urchin village wagon yogurt
    """
)
TRAITS = _words(
    """
    amber bitter calm dusty early frozen gentle hollow icy jolly keen lonely mellow narrow
    olden proud quiet rapid silent tender urban vivid wild young
    """
)


@cache
def paragraphs() -> tuple[tuple[str, ...], ...]:
    """Paragraphs of prose, each as its sentences, in a fixed order."""
    found = []
    for _, topic in shapes.passages():
        for paragraph in re.split(r"\n\s*\n", topic):
            lines = paragraph.splitlines()
            prose = " ".join(paragraph.split())
            if _is_prose(lines, prose):
                found.append(sentences(prose))
    return tuple(found)


def sentences(prose: str) -> tuple[str, ...]:
    """Sentences, each with its full stop."""
    return tuple(re.split(r"(?<=[a-z]\.) (?=[A-Z])", prose))


def digest() -> str:
    """Of all paragraphs: two runs with the same one draw the same text."""
    return hashlib.sha256(repr(paragraphs()).encode()).hexdigest()[:12]


def _is_prose(lines: Sequence[str], prose: str) -> bool:
    if any(line.startswith((" ", "*", "-", "+", "|", ">>>")) for line in lines):
        return False
    letters = sum(char.isalpha() or char == " " for char in prose)
    return 160 <= len(prose) <= 1200 and prose.endswith(".") and letters > 0.92 * len(prose)


def filler(rng: Random, tokens: int, measure: Measure) -> list[str]:
    """Sentences of at most so many tokens, and hardly fewer; running ones where there is room."""
    chosen: list[str] = []

    def add(sentence: str) -> bool:
        nonlocal tokens
        length = measure(f" {sentence}")
        if length > tokens:
            return False
        chosen.append(sentence)
        tokens -= length
        return True

    while all(add(sentence) for sentence in rng.choice(paragraphs())):
        pass
    for paragraph in rng.choices(paragraphs(), k=_LAST_TRIES):
        add(rng.choice(paragraph))  # whatever is short enough for what is left
    return chosen


def document(
    rng: Random, facts: Iterable[str], tokens: int, measure: Measure, title: str = ""
) -> str:
    """Facts, in their order, among sentences that have nothing to do with them.

    Args:
        rng: source of all choices.
        facts: sentences.
        tokens: length of the document, facts included. Facts are never left out.
        measure: tokens of a text.
        title: the first line.
    """
    facts = list(facts)
    taken = sum(measure(f" {fact}") for fact in facts) + measure(f"{title}\n\n\n")
    around = filler(rng, tokens - taken, measure)
    for place, fact in zip(
        sorted((rng.randint(0, len(around)) for _ in facts), reverse=True),
        reversed(facts),
        strict=True,
    ):
        around.insert(place, fact)
    return close(" ".join(around), title)


def close(body: str, title: str = "") -> str:
    """A document as it stands in a prompt: its title, its text, an empty line."""
    return f"{title}\n{body}\n\n" if title else f"{body}\n\n"


def people(rng: Random, count: int) -> list[tuple[str, str]]:
    """(full name, `she` or `he`) of people who share neither first nor family name."""
    first = rng.sample([(name, "she") for name in WOMEN] + [(name, "he") for name in MEN], count)
    return [
        (f"{name} {family}", pronoun)
        for (name, pronoun), family in zip(first, rng.sample(FAMILIES, count), strict=True)
    ]


def numbers(rng: Random, count: int, digits: int = 4) -> list[str]:
    """Different numbers of so many digits."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
