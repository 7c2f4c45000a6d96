# SPDX-License-Identifier: Apache-2.0
"""Two tools of an agent: a calculator and a search. Both answer in JSON.

As those of real services, answers have an id, a time and a duration that differ at every call; the
search also has ids and scores for what it found. So two answers are hardly ever equal, and nearly
always similar.
"""

import ast
import json
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

import bm25s

SCHEMAS: Sequence[Mapping[str, Any]] = (
    {
        "name": "search",
        "description": "Finds articles of the catalogue by any words.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "a few words"}},
            "required": ["query"],
        },
    },
    {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "as 12 * 3 + 4"}},
            "required": ["expression"],
        },
    },
)
"""As OpenAI and others describe functions."""

CATALOGUE: Mapping[str, str] = {
    "blue kettle": "The blue kettle costs 31 euros. It holds two litres and whistles.",
    "oak ladder": "The oak ladder costs 84 euros. It has nine steps and folds.",
    "wool blanket": "The wool blanket costs 45 euros. It is washed by hand.",
    "brass lantern": "The brass lantern costs 27 euros. It burns oil for six hours.",
}
"""A few articles to start with: text by title."""

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST_EXPRESSION = 200


class ToolError(ValueError):
    """There is no such tool, or it cannot be called like this; one sentence."""


class Tools:
    """The tools over some articles.

    Args:
        articles: text by title.
        seed: of all that changes from call to call.
        results: articles that a search finds.
    """

    def __init__(self, articles: Mapping[str, str], seed: object = 0, results: int = 2) -> None:
        self._titles = list(articles)
        self._articles = articles
        self._dice = random.Random(str(seed))
        self._results = min(results, len(self._titles))
        self._index = bm25s.BM25()
        self._index.index(_words([f"{it} {articles[it]}" for it in articles]), show_progress=False)

    def call(self, name: str, given: str) -> str:
        """The observation: JSON in one line; an error is one, too."""
        try:
            content = self._answer(name, given)
        except ToolError as error:
            content = {"error": str(error)}
        return json.dumps(
            {
                "request_id": f"{self._dice.getrandbits(48):012x}",
                "time": self.moment(),
                "took_ms": self._dice.randrange(2, 900),
            }
            | content
        )

    def moment(self) -> str:
        """A time of the year."""
        roll = self._dice.randrange
        day = f"2026-{roll(1, 13):02}-{roll(1, 29):02}"
        return f"{day}T{roll(24):02}:{roll(60):02}:{roll(60):02}Z"

    def _answer(self, name: str, given: str) -> dict[str, Any]:
        if name == "calculator":
            return {"expression": given, "result": calculate(given)}
        if name == "search":
            return {"query": given, "results": [self._result(it) for it in self.find(given)]}
        raise ToolError(f"there is no tool {name!r}, only search and calculator")

    def find(self, query: str) -> list[str]:
        """Titles of the best articles (BM25), the best one first."""
        found, _ = self._index.retrieve(_words([query]), k=self._results, show_progress=False)
        return [self._titles[number] for number in found[0]]

    def _result(self, title: str) -> dict[str, Any]:
        lines = self._articles[title].split(". ")
        return {
            "id": self._dice.randrange(10**5, 10**6),
            "title": title,
            "highlights": [
                {"score": round(self._dice.uniform(1, 20), 2), "text": line.removesuffix(".")}
                for line in lines
            ],
        }


def calculate(expression: str) -> int | float:
    """The value of sums, differences, products and quotients; whole numbers as integers.

    Raises:
        ToolError: it is anything else, or too long.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ToolError("the expression is too long")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return int(value) if value == int(value) else round(value, 4)
    except (SyntaxError, LookupError, ArithmeticError, ValueError, TypeError, RecursionError):
        raise ToolError(f"no arithmetic: {expression!r}") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))  # type: ignore[operator]
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand))  # type: ignore[operator]
    raise ValueError


def _words(texts: Sequence[str]) -> Any:
    return bm25s.tokenize(list(texts), stopwords="en", show_progress=False)
