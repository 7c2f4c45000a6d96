# SPDX-License-Identifier: Apache-2.0
"""JSON lines as examples: what they must hold, and which share of the training each kind has.

The kinds and their shares are those of KVLink (Yang et al., 2025, appendix A.1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

SHARES = {
    "qa": 0.10,
    "chat": 0.25,
    "summaries": 0.05,
    "plain-qa": 0.10,
    "instructions": 0.30,
    "text": 0.20,
}
"""Of the training, by kind; kinds without a file fall out, and the others share what is left."""


class DataError(ValueError):
    """A line that cannot be trained on; says which, and why."""


class Asked(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Example:
    """What one row is made of.

    Attributes:
        where: file and line.
        documents: texts, each computed alone if the example is `isolated`.
        asked: questions about them, each with its answer; at least one, or `text`.
        system: text in front.
        isolated: False: the documents are plain context, computed in their place.
        ordered: the documents are never shuffled.
        text: the example is this text, and has neither documents nor questions.
        segment: the one document is to be cut into segments of so many tokens; 0: it is not.
    """

    where: str
    documents: tuple[str, ...] = ()
    asked: tuple[Asked, ...] = ()
    system: str = ""
    isolated: bool = True
    ordered: bool = False
    text: str = ""
    segment: int = 0


def read(file: Path, kind: str) -> list[Example]:
    """The examples of a file of JSON lines.

    Args:
        file: UTF-8, one mapping a line.
        kind: one of `SHARES`.

    Raises:
        DataError: the file holds no line, or one that is none of its kind.
        OSError: it cannot be read.
    """
    found = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                found.append(parse(line, kind, f"{file}:{number}"))
    if not found:
        raise DataError(f"{file} holds no examples")
    return found


def parse(line: str, kind: str, where: str) -> Example:
    """One line.

    Raises:
        DataError: it is none of its kind.
    """
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise DataError(f"{where} must be a mapping")
    return _PARSERS[kind](_Fields(given, where))


@dataclass(frozen=True)
class _Fields:
    """The fields of a line, each with its type checked."""

    given: Mapping[str, Any]
    where: str

    def text(self, name: str, default: str | None = None) -> str:
        value = self.given.get(name, default)
        if not isinstance(value, str) or (not value.strip() and default is None):
            raise DataError(f"{self.where} has no text {name!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.given.get(name, False)
        if not isinstance(value, bool):
            raise DataError(f"{self.where}: {name!r} must be true or false")
        return value

    def list(self, name: str) -> list[Any]:
        value = self.given.get(name)
        if not isinstance(value, list) or not value:
            raise DataError(f"{self.where} has no {name!r}: a list with at least one is needed")
        return value

    def asked(self) -> tuple[Asked, ...]:
        if "questions" not in self.given:
            return (Asked(self.text("question"), self.text("answer")),)
        parts = [_Fields(one, f"{self.where}, a question,") for one in self.list("questions")]
        if not all(isinstance(part.given, dict) for part in parts):
            raise DataError(f"{self.where}: each of 'questions' must be a mapping")
        return tuple(Asked(part.text("question"), part.text("answer")) for part in parts)


def _qa(fields: _Fields, isolated: bool) -> Example:
    documents = fields.list("documents")
    if not all(isinstance(text, str) and text.strip() for text in documents):
        raise DataError(f"{fields.where}: each of 'documents' must be a text")
    return Example(
        fields.where,
        tuple(documents),
        fields.asked(),
        fields.text("system", ""),
        isolated,
        fields.flag("ordered"),
    )


def _turns(fields: _Fields) -> tuple[str, list[tuple[str, str]]]:
    """The system text, and pairs of what was said and answered."""
    system, said = "", []
    for message in fields.list("messages"):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise DataError(f"{fields.where}: each of 'messages' needs a text 'content'")
        if message.get("role") == "system":
            system = message["content"]
        else:
            said.append((message.get("role"), message["content"]))
    roles = [role for role, _ in said]
    if not said or roles != ["user", "assistant"] * (len(said) // 2):
        raise DataError(
            f"{fields.where}: 'messages' must go from user to assistant in turn, and end with one"
        )
    texts = [text for _, text in said]
    return system, list(zip(texts[::2], texts[1::2], strict=True))


def _chat(fields: _Fields) -> Example:
    system, turns = _turns(fields)
    if len(turns) < 2:
        raise DataError(f"{fields.where} has one turn: 'chat' needs earlier ones")
    documents = tuple("\n".join(turn) for turn in turns[:-1])
    return Example(fields.where, documents, (Asked(*turns[-1]),), system, ordered=True)


def _instructions(fields: _Fields) -> Example:
    if "messages" not in fields.given:
        return Example(fields.where, (), fields.asked(), fields.text("system", ""), False)
    system, turns = _turns(fields)
    before = tuple("\n".join(turn) for turn in turns[:-1])
    return Example(fields.where, before, (Asked(*turns[-1]),), system, False, True)


def _summaries(fields: _Fields) -> Example:
    asked = Asked(fields.text("question", "Summarize the text."), fields.text("summary"))
    return Example(fields.where, (fields.text("text"),), (asked,), ordered=True, segment=100)


_PARSERS: dict[str, Callable[[_Fields], Example]] = {
    "qa": lambda fields: _qa(fields, True),
    "plain-qa": lambda fields: _qa(fields, False),
    "chat": _chat,
    "instructions": _instructions,
    "summaries": _summaries,
    "text": lambda fields: Example(fields.where, text=fields.text("text")),
}


class Mixture:
    """An endless sequence of examples, in which each kind has its share.

    Number `i` of it depends on the seed and `i` only, so that a training goes on where it stopped.

    Args:
        examples: by kind.
        shares: by kind; kinds without examples are left out.
        seed: of the order.

    Raises:
        DataError: no kind has a share.
    """

    def __init__(
        self, examples: Mapping[str, Sequence[Example]], shares: Mapping[str, float], seed: int
    ) -> None:
        self._kinds = [kind for kind in examples if shares.get(kind, 0) > 0]
        if not self._kinds:
            raise DataError("no data: each kind that was given has share 0")
        self._shares = [shares[kind] for kind in self._kinds]
        self._examples = examples
        self._seed = seed

    def draw(self, number: int) -> Example:
        """Example `number`, its documents shuffled unless they are ordered."""
        rng = Random(f"{self._seed} {number}")
        kind = rng.choices(self._kinds, self._shares)[0]
        example = rng.choice(self._examples[kind])
        if example.ordered or not example.documents:
            return example
        documents = tuple(rng.sample(example.documents, len(example.documents)))
        return Example(**{**vars(example), "documents": documents})

    def __iter__(self) -> Iterator[Example]:
        number = 0
        while True:
            yield self.draw(number)
            number += 1
