# SPDX-License-Identifier: Apache-2.0
"""Ways to come by what stands in front of a question, and what the model then answers.

full            everything is read
composed        KV is moved, states go through the maps of the documents; nothing is read
composed-bf16   as composed, maps and tails rounded to bfloat16
no-states       KV is moved, states stay as they were in front of the documents
last-state      KV is moved, states go through the map of the last document only
exact-kv        KV of full prefill, states as composed
exact-states    KV is moved, states of full prefill
heads-16, -64   so many tokens of each document are read, the rest as composed
documents-1, -2 as composed; the question's attention then chooses so many documents, which are read
                whole at their places; the question is read again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bench.quality import language
from bench.quality.tasks.base import Question
from lab.hybrids.worlds import World
from lab.segments import Memory, Reader, Segment

HEADS = (16, 64)
CHOSEN = (1, 2)
SOURCES = ("alone", "siblings")

Document = list[Segment]
"""Read elsewhere, in pieces that end where heads do."""


@dataclass(frozen=True)
class Answers:
    """Of all questions of a world, in order.

    Attributes:
        logits: of the first word, `[questions, vocabulary]`.
        right: whether all words of the answer are the largest, the right ones in front of them.
        work: tokens read, of all tokens of the prompt; mean of the questions.
    """

    logits: Tensor
    right: list[bool]
    work: float


class Questions:
    """Questions of a world as rows of one batch, filled up behind, where nothing looks."""

    def __init__(self, asked: Sequence[Question]) -> None:
        self._words = [language.encode(one.words) for one in asked]
        self._answers = [language.encode(one.answer) for one in asked]
        self.lengths = [len(one) for one in self._words]
        self.number = len(asked)
        both = [a + b for a, b in zip(self._words, self._answers, strict=True)]
        longest = max(map(len, both))
        self._tokens = torch.tensor([one + [0] * (longest - len(one)) for one in both])

    @property
    def mean_length(self) -> float:
        """Words of a question, without its answer."""
        return sum(self.lengths) / self.number

    def answered(self, reader: Reader, memory: Memory, work: float) -> Answers:
        """What is said behind a memory of one row, or of a row for each question."""
        hidden = reader.read(self._tokens, self._each(memory)).hidden
        logits = reader.model.head(hidden)
        first, right = [], []
        for row, (start, answer) in enumerate(zip(self.lengths, self._answers, strict=True)):
            said = logits[row, start - 1 : start - 1 + len(answer)]
            first.append(said[0])
            right.append(said.argmax(-1).tolist() == answer)
        return Answers(torch.stack(first), right, work)

    def paid(self, reader: Reader, memory: Memory) -> Tensor:
        """`[questions, memory.length]`: attention that the words of each question pay."""
        found = []
        for row, words in enumerate(self._words):
            of_row = memory.rows(torch.tensor([min(row, memory.num_rows - 1)]))
            paid = reader.read(words, of_row, pays=True).paid
            assert paid is not None
            found.append(paid[0, : memory.length])
        return torch.stack(found)

    def _each(self, memory: Memory) -> Memory:
        if memory.num_rows == self.number:
            return memory
        return memory.rows(torch.zeros(self.number, dtype=torch.int64))


class Prompt:
    """A world, read in full once."""

    def __init__(self, reader: Reader, world: World) -> None:
        self.reader, self.world = reader, world
        self.questions = Questions(world.questions)
        self.head = reader.read(world.head, reader.nothing()).memory
        self.full = self.head
        for tokens in world.documents:
            self.full = reader.read(tokens, self.full).memory
        self.tokens = self.full.length + self.questions.mean_length

    def answers_of_full(self) -> Answers:
        """Full prefill."""
        return self.questions.answered(self.reader, self.full, 1.0)

    def apart_from_one_reading(self, answers: Answers) -> float:
        """How far the first question's logits are from those of the prompt as one row."""
        words = language.encode(self.world.questions[0].words)
        documents = [token for one in self.world.documents for token in one]
        hidden = self.reader.model(torch.tensor([self.world.head + documents + words]))[0, -1]
        return float((self.reader.model.head(hidden) - answers.logits[0]).abs().max())

    def donors(self, source: str) -> list[Document]:
        """Each document, read behind another head, and behind the siblings or nothing else.

        Raises:
            ValueError: there is no such source.
        """
        if source not in SOURCES:
            raise ValueError(f"no source {source!r}; there are {', '.join(SOURCES)}")
        memory = self.reader.read(self.world.donor_head, self.reader.nothing()).memory
        if source == "siblings":
            for tokens in self.world.siblings:
                memory = self.reader.read(tokens, memory).memory
        return [in_pieces(self.reader, tokens, memory) for tokens in self.world.documents]

    def put(
        self,
        documents: Sequence[Document],
        heads: int = 0,
        passes: Callable[[int], bool] = lambda _: True,
    ) -> Memory:
        """All documents behind the head.

        Args:
            documents: read elsewhere.
            heads: tokens of each that are read here instead; where a piece ends, or 0.
            passes: whether states pass through document number so-and-so.
        """
        memory = self.head
        for number, (tokens, pieces) in enumerate(
            zip(self.world.documents, documents, strict=True)
        ):
            behind = 0
            if heads:
                memory = self.reader.read(tokens[:heads], memory).memory
            for piece in pieces:
                if behind >= heads:
                    memory = self.reader.put(piece, memory, passes(number))
                behind += piece.length
        return memory

    def with_read(self, documents: Sequence[Document], chosen: Tensor) -> Memory:
        """A row for each question: what it chose is read at its place, the rest is put.

        Args:
            documents: read elsewhere.
            chosen: bool `[questions, documents]`.
        """
        memory = self.head.rows(torch.zeros(chosen.shape[0], dtype=torch.int64))
        for number, (tokens, pieces) in enumerate(
            zip(self.world.documents, documents, strict=True)
        ):
            reads, puts = (side.nonzero()[:, 0] for side in (chosen[:, number], ~chosen[:, number]))
            parts = []
            if len(reads):
                rows = torch.tensor(tokens).expand(len(reads), -1)
                parts.append(self.reader.read(rows, memory.rows(reads)).memory)
            if len(puts):
                part = memory.rows(puts)
                for piece in pieces:
                    part = self.reader.put(piece, part)
                parts.append(part)
            memory = Memory.of_rows(parts).rows(torch.cat((reads, puts)).argsort())
        return memory

    def choices(self, memory: Memory, number: int) -> Tensor:
        """Documents to which each question pays most attention, bool `[questions, documents]`."""
        paid = self.questions.paid(self.reader, memory)
        lengths = [len(tokens) for tokens in self.world.documents]
        masses = paid[:, self.head.length :].split(lengths, 1)
        of_documents = torch.stack([mass.sum(1) for mass in masses], 1)
        best = of_documents.topk(number).indices
        return torch.zeros_like(of_documents, dtype=torch.bool).scatter(1, best, value=True)

    def arms(self, documents: Sequence[Document]) -> dict[str, Answers]:
        """All arms but full prefill, by name, with documents of one source."""
        last = len(documents) - 1
        composed = self.put(documents)
        rounded = [[piece.as_dtype(torch.bfloat16) for piece in one] for one in documents]
        memories = {
            "composed": composed,
            "composed-bf16": self.put(rounded),
            "no-states": self.put(documents, passes=lambda _: False),
            "last-state": self.put(documents, passes=lambda number: number == last),
            "exact-kv": self.full.with_states_of(composed),
            "exact-states": composed.with_states_of(self.full),
        }
        new = self.head.length + self.questions.mean_length
        found = {name: self._answered(memory, new) for name, memory in memories.items()}
        for heads in HEADS:
            memory = self.put(documents, heads)
            found[f"heads-{heads}"] = self._answered(memory, new + heads * len(documents))
        for number in CHOSEN:
            chosen = self.choices(composed, number)
            lengths = torch.tensor([float(len(one)) for one in self.world.documents])
            read = float((chosen * lengths).sum(1).mean())
            again = self.questions.mean_length
            memory = self.with_read(documents, chosen)
            found[f"documents-{number}"] = self._answered(memory, new + read + again)
        return found

    def _answered(self, memory: Memory, tokens: float) -> Answers:
        return self.questions.answered(self.reader, memory, tokens / self.tokens)


def in_pieces(reader: Reader, tokens: Sequence[int], memory: Memory) -> Document:
    """Read a document behind a memory, and keep it in pieces that end where heads do."""
    inside = (heads for heads in HEADS if heads < len(tokens))
    pieces = []
    for first, stop in pairwise((0, *inside, len(tokens))):
        read = reader.read(tokens[first:stop], memory, kept=True)
        assert read.segment is not None
        pieces.append(read.segment)
        memory = read.memory
    return pieces
