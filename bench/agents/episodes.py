# SPDX-License-Identifier: Apache-2.0
"""Episodes of six to ten steps, whose right actions and answers are known.

An agent is asked what some articles cost together. It searches for each, multiplies its price, adds
up and answers. Articles are a sentence with the price among sentences of Python's documentation
(`bench.english.text`); observations have other ids, scores and times at every call.

Every step has a label, so that it can be asked by itself: behind the right history and a given
thought, which does not tell the values, so that the model has to read them in the observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random

from bench.english import text
from examples.agents.tools import Tools

SEARCH, CALCULATOR, FINAL = "search", "calculator", "final"
ITEMS = (2, 3, 4)
"""Articles of a question: an episode has two steps for each, and two more."""
_ARTICLES = 60
_FILLERS = 2
_FILLER_CHARS = (60, 130)


@dataclass(frozen=True)
class Step:
    """One step of an episode.

    Attributes:
        tool: that is called; `FINAL`: none, the answer is given.
        given: right input of the tool, or the right answer.
        thought: in front of it.
        observation: what the tool says to the right input.
    """

    tool: str
    given: str
    thought: str
    observation: str = ""

    @property
    def lead(self) -> str:
        """What is in front of what the model writes."""
        return f"Thought: {self.thought}\n" + ("Final Answer:" if self.tool == FINAL else "Action:")

    @property
    def label(self) -> str:
        """What the model should write."""
        return (
            f" {self.given}" if self.tool == FINAL else f" {self.tool}\nAction Input: {self.given}"
        )

    @property
    def text(self) -> str:
        """All of it, as the history of later steps has it."""
        return f"{self.lead}{self.label}\nObservation: {self.observation}\n"


@dataclass(frozen=True)
class Episode:
    """A question, its answer, and the right way to it."""

    question: str
    answer: str
    steps: tuple[Step, ...]

    def history(self, number: int) -> str:
        """The right steps before one, and what is in front of the model's text there."""
        return "".join(step.text for step in self.steps[:number]) + self.steps[number].lead


@dataclass(frozen=True)
class Shop:
    """Articles: text by title, and price by title."""

    articles: Mapping[str, str]
    prices: Mapping[str, int]


def shop(rng: Random) -> Shop:
    """Articles with different prices."""
    titles = [f"{trait} {thing}" for trait in text.TRAITS for thing in text.THINGS]
    chosen = rng.sample(titles, _ARTICLES)
    prices = dict(zip(chosen, map(int, text.numbers(rng, _ARTICLES, digits=3)), strict=True))
    return Shop({title: _article(rng, title, prices[title]) for title in chosen}, prices)


def episode(rng: Random, goods: Shop, tools: Tools, items: int | None = None) -> Episode:
    """A question about some articles (`ITEMS`), with the tools really called."""
    bought = rng.sample(sorted(goods.prices), items or rng.choice(ITEMS))
    counts = [rng.randrange(2, 10) for _ in bought]
    wanted = " and ".join(f"{count} of the {it}" for count, it in zip(counts, bought, strict=True))
    costs = [count * goods.prices[it] for count, it in zip(counts, bought, strict=True)]
    steps: list[Step] = []

    def add(tool: str, given: str, thought: str) -> None:
        steps.append(Step(tool, given, thought, tools.call(tool, given)))

    for count, it in zip(counts, bought, strict=True):
        add(SEARCH, it, f"I need the price of the {it}.")
        expression = f"{goods.prices[it]} * {count}"
        add(CALCULATOR, expression, f"I multiply the price of the {it} by {count}.")
    add(CALCULATOR, " + ".join(map(str, costs)), "I add up the results.")
    answer = str(sum(costs))
    steps.append(Step(FINAL, answer, "I know the answer."))
    return Episode(f"What do {wanted} cost together?", answer, tuple(steps))


def _article(rng: Random, title: str, price: int) -> str:
    lines = [f"The {title} costs {price} euros.", *rng.sample(_fillers(), _FILLERS)]
    rng.shuffle(lines)
    return " ".join(lines)


@cache
def _fillers() -> tuple[str, ...]:
    """Sentences of documentation without numbers."""
    shortest, longest = _FILLER_CHARS
    found = (
        line.replace("*", "").replace('"', "'")
        for line in chain.from_iterable(text.paragraphs())
        if shortest <= len(line) <= longest and not any(map(str.isdigit, line))
    )
    # A full stop within would be an end of a line for the search.
    return tuple(line for line in found if line.count(".") == 1 and line.endswith("."))
