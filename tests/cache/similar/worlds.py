# SPDX-License-Identifier: Apache-2.0
"""A segment index with a similarity index behind it, and texts to fill them with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from segreuse_extras.similar.canonical import Vocabulary
from segreuse_extras.similar.finder import SimilarFinder
from segreuse_extras.similar.options import SimilarityOptions
from segreuse_extras.similar.store import SimilarStore
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.compat.block_events import NamedBlocks
from vllm_segreuse.scheduling.donors import Donors
from vllm_segreuse.scheduling.health import Health
from vllm_segreuse.scheduling.tracked import Method, TrackedRequest

SIZE = 16
MAX_DEPTH = 2
VALUES = [str(i) for i in range(1000)]
"""Tokens below 1000 are numbers."""
WORDS = [f" word{i}" for i in range(50_000)]
VOCABULARY = Vocabulary.of_texts([*VALUES, *WORDS], SimilarityOptions().volatile)
FIRST_WORD = len(VALUES)


class World:
    """The scheduler's side without requests: documents are cached, prompts are searched for."""

    def __init__(
        self, num_blocks: int = 512, vocabulary: Vocabulary = VOCABULARY, **options: Any
    ) -> None:
        self.options = SimilarityOptions(**options)
        self.index = SegmentIndex(num_blocks, SIZE)
        self.names = NamespaceTable(lambda namespace: self.index.population(namespace) > 0)
        self.mine, self.theirs = self.names.intern(b"mine"), self.names.intern(b"theirs")
        self.store = SimilarStore(self.index, self.names, vocabulary, self.options)
        self.content = ContentFinder(self.index, MAX_DEPTH)
        self.searches: list[float] = []
        ticks = count()
        self.finder = SimilarFinder(
            self.content,
            self.store,
            self.index,
            MAX_DEPTH,
            lambda: float(next(ticks)),
            self.searches.append,
        )
        self._requests: dict[str, TrackedRequest] = {}
        unused: Any = None
        self._method = Method("similar", unused, unused)
        self.donors = Donors(self.index, self._requests, MAX_DEPTH, Health(), [self.store])
        self._draw = np.random.default_rng(3)
        self._blocks = count()

    def words(self, number: int) -> list[int]:
        """New text."""
        return self._draw.integers(FIRST_WORD, FIRST_WORD + len(WORDS), number).tolist()

    def records(self, wording: Sequence[Sequence[int]]) -> list[int]:
        """A text of this wording with other values between its parts."""
        values = self._draw.integers(0, FIRST_WORD, 2 * len(wording)).tolist()
        text: list[int] = []
        for i, part in enumerate(wording):
            text += [*part, *values[2 * i : 2 * i + 2]]
        return text

    def cache(
        self, text: Sequence[int], namespace: int | None = None, step: bool = True
    ) -> list[int]:
        """A request computed this text: its full blocks are named; their ids."""
        namespace = self.mine if namespace is None else namespace
        prompt = Prompt(namespace, np.array(text, np.int32))
        name = f"request {len(self._requests)}"
        self._requests[name] = TrackedRequest(name, prompt, self._method)
        blocks = [next(self._blocks) for _ in range(len(text) // SIZE)]
        self.donors.named(NamedBlocks(name, 0, blocks, -1, text))
        if step:
            self.donors.begin_step()
        return blocks

    def arrive(self, text: Sequence[int], namespace: int | None = None) -> Prompt:
        namespace = self.mine if namespace is None else namespace
        prompt = Prompt(namespace, np.array(text, np.int32))
        self.finder.prepare(prompt)
        return prompt

    def find(self, prompt: Prompt, start: int = 0) -> Matches:
        """What may be reused; its tokens are those of the prompt, and its places the donors'."""
        matches = self.finder.find(prompt, start, prompt.tokens.size - 1)
        for to, length, block, offset, position in matches.pieces.rows():
            assert 0 < length <= SIZE - offset
            entry = int(self.index.entries(prompt.namespace, np.array([block], np.int32))[0])
            assert entry >= 0, "a block that this namespace does not know"
            held = self.index.tokens[block, offset : offset + length]
            assert held.tolist() == prompt.tokens[to : to + length].tolist()
            assert position == self.index.nodes["position"][entry] + offset
        destinations = matches.pieces.destination
        assert (np.diff(destinations) >= matches.pieces.length[:-1]).all(), "they overlap"
        assert matches.num_tokens == matches.pieces.num_tokens
        return matches
