# SPDX-License-Identifier: Apache-2.0
"""Questions about people and projects: one hop, two hops, a fact tied to its name by a pronoun."""

from __future__ import annotations

from random import Random

from bench.english import text
from bench.english.tasks.base import Example, Layout, split
from bench.english.text import Measure

_ONLY_CITY = "Answer with the city only."
_ONLY_NUMBER = "Answer with the number only."


def one_hop(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """Where somebody works: one sentence says so."""
    names = [name for name, _ in text.people(rng, layout.total)]
    cities = rng.sample(text.CITIES, layout.total)
    documents, others = split(
        [
            text.document(rng, [f"{name} works in {city}."], layout.tokens, measure)
            for name, city in zip(names, cities, strict=True)
        ]
    )
    asked = rng.randrange(layout.count)
    return Example(
        "one-hop",
        kind,
        documents,
        others,
        f"Using only the text above: in which city does {names[asked]} work? {_ONLY_CITY}",
        (cities[asked],),
        _but(cities, asked),
    )


def two_hops(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """Where the leader of a project works: one document names the leader, another the city."""
    pairs = layout.total // 2
    names = [name for name, _ in text.people(rng, pairs)]
    cities = rng.sample(text.CITIES, pairs)
    projects = [thing.capitalize() for thing in rng.sample(text.THINGS, pairs)]
    facts = [
        fact
        for name, city, project in zip(names, cities, projects, strict=True)
        for fact in (f"Project {project} is led by {name}.", f"{name} works in {city}.")
    ]
    written = [text.document(rng, [fact], layout.tokens, measure) for fact in facts]
    documents, others = list(written[: layout.count]), tuple(written[layout.count :])
    rng.shuffle(documents)
    asked = rng.randrange(layout.count // 2)
    return Example(
        "two-hop",
        kind,
        tuple(documents),
        others,
        f"Using only the text above: in which city does the leader of Project {projects[asked]} "
        f"work? {_ONLY_CITY}",
        (cities[asked],),
        _but(cities, asked),
    )


def pronoun(rng: Random, layout: Layout, measure: Measure, kind: str) -> Example:
    """A number that belongs to `she` or `he`: the name comes once, sentences before."""
    people = text.people(rng, layout.total)
    codes = text.numbers(rng, layout.total)
    written = []
    for (name, she), code in zip(people, codes, strict=True):
        her = {"she": "her", "he": "his"}[she]
        opening = f"This note is about {name}, who joined the company in {rng.randint(1990, 2020)}."
        fact = f"The number of the locker that {she} keeps {her} tools in is {code}."
        room = layout.tokens - measure(f"{opening} {fact}\n\n")
        between = text.filler(rng, room // 2, measure)
        behind = text.filler(rng, room - sum(measure(f" {one}") for one in between), measure)
        written.append(text.close(" ".join([opening, *between, fact, *behind])))
    documents, others = split(written)
    asked = rng.randrange(layout.count)
    return Example(
        "pronoun",
        kind,
        documents,
        others,
        "Using only the text above: what is the number of the locker in which "
        f"{people[asked][0]} keeps tools? {_ONLY_NUMBER}",
        (codes[asked],),
        _but(codes, asked),
    )


def _but(values: list[str], asked: int) -> tuple[str, ...]:
    """All values but the one asked for: they are wrong answers."""
    return tuple(value for index, value in enumerate(values) if index != asked)
