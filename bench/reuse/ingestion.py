# SPDX-License-Identifier: Apache-2.0
"""How documents come by their KV: as `bench english` has them computed, and in further ways.

mean-2, mean-4  behind two, or four, different pairs of documents; keys before their rotation, and
                values, averaged. The first pair is that of `siblings`
nearest         each behind the two documents of its set that have most words in common with it, as
                FusionRAG (arXiv 2601.12904) prepares a base
any             each behind two documents of its set by chance, which `nearest` is compared with
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from types import MappingProxyType

import torch

from bench.english.donors import END, PROMPTS
from bench.english.prompts import NOTES, Prompts
from bench.english.tasks.base import Example
from bench.reuse.decoder import KV, Decoder
from bench.reuse.scene import computed_in

Texts = Callable[[], Sequence[str]]
"""Documents of other examples of the task, drawn where they are wanted: that takes time."""

Source = Callable[[Decoder, Prompts, Example, Texts, Random], list[KV]]
"""KV of each document of an example, turned to begin at position 0."""


def _as_asked(kind: str) -> Source:
    def source(
        decoder: Decoder, prompts: Prompts, example: Example, texts: Texts, rng: Random
    ) -> list[KV]:
        return _in(decoder, prompts, example, PROMPTS[kind](example, prompts, rng))

    return source


def _mean(contexts: int) -> Source:
    def source(
        decoder: Decoder, prompts: Prompts, example: Example, texts: Texts, rng: Random
    ) -> list[KV]:
        pairs = [list(example.others)] + [rng.sample(texts(), 2) for _ in range(contexts - 1)]
        number = len(example.documents)
        found = [
            _in(decoder, prompts, example, _behind(prompts, example, [pair] * number))
            for pair in pairs
        ]
        return [_mean_of(one) for one in zip(*found, strict=True)]

    return source


def _mean_of(found: Sequence[KV]) -> KV:
    keys = torch.stack([one.keys for one in found])
    values = torch.stack([one.values for one in found])
    return KV(keys.mean(0), values.mean(0))


def _nearest(
    decoder: Decoder, prompts: Prompts, example: Example, texts: Texts, rng: Random
) -> list[KV]:
    base = [*example.others, *example.documents]
    return _in(decoder, prompts, example, _behind(prompts, example, nearest(example, base)))


def _any(
    decoder: Decoder, prompts: Prompts, example: Example, texts: Texts, rng: Random
) -> list[KV]:
    base = [*example.others, *example.documents]
    pairs = [rng.sample([one for one in base if one != text], 2) for text in example.documents]
    return _in(decoder, prompts, example, _behind(prompts, example, pairs))


def nearest(example: Example, base: Sequence[str]) -> list[list[str]]:
    """Of each document the two others of a base that are nearest by their words (cosine of tf-idf),
    the nearest last."""
    counts = {text: Counter(text.lower().split()) for text in base}
    seen = Counter(word for words in counts.values() for word in words)
    weights = {
        text: {word: n * math.log(len(base) / seen[word]) for word, n in words.items()}
        for text, words in counts.items()
    }
    found = []
    for text in example.documents:
        others = sorted(
            (one for one in base if one != text),
            key=lambda one: _cosine(weights[text], weights[one]),
        )
        found.append(others[-2:])
    return found


def _cosine(one: dict[str, float], other: dict[str, float]) -> float:
    product = sum(weight * other.get(word, 0.0) for word, weight in one.items())
    norms = [math.sqrt(sum(weight**2 for weight in vector.values())) for vector in (one, other)]
    return product / (norms[0] * norms[1]) if all(norms) else 0.0


def _behind(prompts: Prompts, example: Example, pairs: Sequence[Sequence[str]]) -> list[list[int]]:
    return [
        prompts.prompt([*pair, text], END, NOTES)
        for pair, text in zip(pairs, example.documents, strict=True)
    ]


def _in(
    decoder: Decoder, prompts: Prompts, example: Example, asked: Sequence[list[int]]
) -> list[KV]:
    """Each document where it is the last of its prompt, or where it is at all."""
    texts = [prompts.encode_document(text) for text in example.documents]
    return computed_in(decoder, asked, texts)


SOURCES: MappingProxyType[str, Source] = MappingProxyType(
    {
        **{kind: _as_asked(kind) for kind in PROMPTS},
        "mean-2": _mean(2),
        "mean-4": _mean(4),
        "nearest": _nearest,
        "any": _any,
    }
)
"""By name."""
