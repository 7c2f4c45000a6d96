# SPDX-License-Identifier: Apache-2.0
"""Examples, drawn and asked: one full prefill and one set of donors for all leads of an example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from bench.english import grading
from bench.english.prompts import Prompts
from bench.english.tasks import draw
from bench.english.tasks.base import Example
from bench.quality import seeds
from bench.reuse.decoder import Decoder
from bench.reuse.ingestion import SOURCES
from bench.reuse.leads import Named, lead
from bench.reuse.records import Outcome, Record
from bench.reuse.scene import Asked, Scene, in_full

DRAWS = 20
"""Of an example, until one is short enough."""


@dataclass(frozen=True)
class Wanted:
    """What is compared.

    Attributes:
        sources: of the documents' KV, by name.
        leads: ways to recompute.
        shares: of the reused tokens, that each may compute.
    """

    sources: tuple[str, ...]
    leads: tuple[Named, ...]
    shares: tuple[float, ...]

    @classmethod
    def named(cls, sources: str, leads: str, shares: str) -> Wanted:
        """From lists with commas.

        Raises:
            ValueError: a name or a number is wrong; the text says which there are.
        """
        names = tuple(filter(None, sources.split(",")))
        for name in names:
            if name not in SOURCES:
                raise ValueError(f"no source {name!r}; there are {', '.join(SOURCES)}")
        numbers = tuple(float(one) for one in filter(None, shares.split(",")))
        for number in numbers:
            if not 0 < number <= 1:
                raise ValueError(f"a share of {number}: it is above 0, and at most 1")
        return cls(names, tuple(map(lead, filter(None, leads.split(",")))), numbers)


class Laboratory:
    """A model, and perhaps another that chooses for it.

    Args:
        model, chooser: their folders.
        dtype: of weights and KV.
        which: set of seeds.
        most: tokens of an example's documents.
    """

    def __init__(
        self, model: Path, chooser: Path | None, dtype: str, which: str, most: int
    ) -> None:
        self._decoder = Decoder.load(model, getattr(torch, dtype))
        self._chooser = None if chooser is None else Decoder.load(chooser, getattr(torch, dtype))
        self._prompts = Prompts(self._decoder.tokenizer)
        self._which, self._most = which, most
        self._draw = lru_cache(maxsize=64)(self._drawn)

    def measured(self, task: str, number: int, wanted: Wanted) -> Iterator[Record]:
        """Ask one example, its documents' KV from each source; nothing if it is too long."""
        for source, example, scene in self.scenes(task, number, wanted.sources):
            yield Record(
                task=task,
                number=number,
                source=source,
                documents=len(example.documents),
                tokens=len(scene.asked.tokens),
                reused=scene.num_reused,
                full=self._score(example, scene.asked.answer),
                leads=self._outcomes(scene, example, wanted),
            )

    def scenes(
        self, task: str, number: int, sources: Sequence[str]
    ) -> Iterator[tuple[str, Example, Scene]]:
        """One example with its documents' KV from each source; nothing if it is too long."""
        example = self._draw(task, number)
        if example is None:
            return
        asked = in_full(self._decoder, self._prompts, example)
        second = None
        if self._chooser is not None:
            second = in_full(self._chooser, self._prompts, example)
        for source in sources:
            yield source, example, self._scene(example, asked, second, source, number)

    def _scene(
        self,
        example: Example,
        asked: Asked,
        second: Asked | None,
        source: str,
        number: int,
    ) -> Scene:
        def texts() -> list[str]:
            # Of the same length: RULER's tasks have three by turns.
            others = [self._draw(example.task, number + 999 * i) for i in range(1, 4)]
            return [text for other in others if other for text in other.documents]

        def scene(decoder: Decoder, asked: Asked, chooser: Scene | None) -> Scene:
            rng = seeds.rng(self._which, f"{example.task} {source}", number)
            donors = SOURCES[source](decoder, self._prompts, example, texts, rng)
            return Scene(decoder, asked, donors, chooser)

        other = scene(self._chooser, second, None) if self._chooser and second else None
        return scene(self._decoder, asked, other)

    def _drawn(self, task: str, number: int) -> Example | None:
        measure = self._prompts.measure
        for again in range(DRAWS):
            rng = seeds.rng(self._which, f"reuse {task} {again}", number)
            example = draw(task, number, rng, measure)
            if sum(map(measure, example.documents)) <= self._most:
                return example
        return None

    def _outcomes(self, scene: Scene, example: Example, wanted: Wanted) -> dict[str, Outcome]:
        asked, found = scene.asked, {}
        for named in wanted.leads:
            for share in wanted.shares if named.has_share else (0.0,):
                name = f"{named.name}@{share:g}" if named.has_share else named.name
                answered = named.lead(scene, round(share * scene.num_reused))
                score = self._score(example, answered.own(asked.answer))
                found[name] = Outcome.of(asked, answered.logits, score)
        return found

    def _score(self, example: Example, answer: Sequence[int]) -> float:
        read = answer[: example.answer_tokens]
        said = self._decoder.tokenizer.decode(read, skip_special_tokens=True)
        return grading.score(said, example.answers, example.wrong)
