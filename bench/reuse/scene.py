# SPDX-License-Identifier: Apache-2.0
"""A question about documents whose KV was computed in other prompts, ready to be asked in any way.

Full prefill, the donors and the first reading of the new text are computed once. A lead then only
chooses, and its answer costs what it recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from bench.english.prompts import Prompts
from bench.english.tasks.base import ANSWER_TOKENS, Example
from bench.reuse.decoder import KV, Carry, Decoder, Paid
from vllm_segreuse.plan.programs import LAST_PROBES
from vllm_segreuse.policies.base import QUESTION_TOKENS


@dataclass(frozen=True)
class Asked:
    """A prompt, and what full prefill makes of it.

    Attributes:
        tokens: ids of the prompt.
        documents: where each of them stands, `[first, stop)`.
        exact: KV of the prompt, with room for an answer.
        answer: ids of the answer by full prefill, its end with them.
        logits: `[answer, vocabulary]`, of which they are the largest.
    """

    tokens: list[int]
    documents: list[tuple[int, int]]
    exact: KV
    answer: list[int]
    logits: torch.Tensor


def in_full(decoder: Decoder, prompts: Prompts, example: Example) -> Asked:
    """Full prefill, and its answer."""
    tokens = prompts.prompt(example.documents, example.question)
    room = len(tokens) + ANSWER_TOKENS
    kv, answer, logits = decoder.empty(room), list[int](), list[torch.Tensor]()
    computed, first = tokens, 0
    while not _has_ended(answer, decoder):
        positions = torch.arange(first, first + len(computed))
        logits.append(decoder.compute(kv, computed, positions))
        answer.append(int(logits[-1].argmax()))
        computed, first = answer[-1:], first + len(computed)
    documents = _where(tokens, [prompts.encode_document(text) for text in example.documents])
    return Asked(tokens, documents, kv, answer, torch.cat(logits))


@dataclass(frozen=True)
class Answered:
    """What a model says behind a prompt.

    Attributes:
        logits: float32 `[answer, vocabulary]`, along the answer of full prefill.
        kv: of the prompt and that answer.
        stop: tokens of the prompt.
        decoder: that computes.
    """

    logits: torch.Tensor
    kv: KV
    stop: int
    decoder: Decoder

    def own(self, answer: Sequence[int]) -> list[int]:
        """Its own answer, which goes its way where it leaves that of full prefill."""
        said: list[int] = []
        for given, token in zip(answer, self.logits.argmax(-1).tolist(), strict=True):
            said.append(token)
            if token != given:
                break
        kv = self.kv.copy()
        while not _has_ended(said, self.decoder):
            position = torch.tensor([self.stop + len(said) - 1])
            said.append(int(self.decoder.compute(kv, said[-1:], position).argmax()))
        return said


def _has_ended(answer: Sequence[int], decoder: Decoder) -> bool:
    return len(answer) == ANSWER_TOKENS or (bool(answer) and answer[-1] in decoder.stops)


def computed_in(
    decoder: Decoder, asked: Sequence[list[int]], texts: Sequence[Sequence[int]]
) -> list[KV]:
    """KV of texts, each as the last prompt that has it left it, turned to begin at position 0.

    Raises:
        ValueError: a text is in none.
    """
    found: dict[int, KV] = {}
    kv, before = decoder.empty(max(map(len, asked))), list[int]()
    for prompt in asked:
        inside = [(i, first) for i, text in enumerate(texts) if (first := _find(prompt, text)) >= 0]
        if not inside:
            continue
        prompt = prompt[: max(first + len(texts[i]) for i, first in inside)]
        known = _common(before, prompt)
        if known < len(prompt):
            decoder.compute(kv, prompt[known:], torch.arange(known, len(prompt)), logits=0)
        before = prompt
        for i, first in inside:
            found[i] = decoder.moved(kv, first, first + len(texts[i]), 0)
    if len(found) < len(texts):
        raise ValueError(f"{len(texts) - len(found)} of {len(texts)} texts are in no prompt")
    return [found[i] for i in range(len(texts))]


@dataclass
class Scene:
    """A prompt whose documents were moved here, behind the first reading of its new text.

    Attributes:
        decoder: that computes.
        asked: the prompt.
        donors: KV of each document, at position 0.
        chooser: the same prompt before another model, which may choose for this one.
    """

    decoder: Decoder
    asked: Asked
    donors: list[KV]
    chooser: Scene | None = None
    kv: KV = field(init=False)
    """Documents moved, all else computed against them."""
    paid: torch.Tensor = field(init=False)
    """Float32 `[layers, 2, heads, tokens]`: by the question, and by its last tokens."""

    def __post_init__(self) -> None:
        self.kv = self.moved(self.donors)
        self.paid = self.read(self.kv)

    @cached_property
    def is_document(self) -> torch.Tensor:
        """Bool `[tokens]`."""
        inside = torch.zeros(len(self.asked.tokens), dtype=torch.bool)
        for first, stop in self.asked.documents:
            inside[first:stop] = True
        return inside

    @property
    def num_reused(self) -> int:
        """Tokens of all documents."""
        return int(self.is_document.sum())

    @cached_property
    def new(self) -> torch.Tensor:
        """Positions of what is in no document."""
        return (~self.is_document).nonzero()[:, 0]

    @cached_property
    def question(self) -> torch.Tensor:
        """Positions of the end of the new text, as policies read it."""
        behind = max(stop for _, stop in self.asked.documents)
        return self.new[self.new >= behind][-QUESTION_TOKENS:]

    def moved(self, donors: Sequence[KV]) -> KV:
        """KV of the prompt with these at its documents, and nothing else."""
        kv = self.decoder.empty(len(self.asked.tokens) + ANSWER_TOKENS)
        for (first, stop), donor in zip(self.asked.documents, donors, strict=True):
            here = self.decoder.moved(donor, 0, stop - first, first)
            kv.keys[:, :, first:stop], kv.values[:, :, first:stop] = here.keys, here.values
        return kv

    def read(
        self,
        kv: KV,
        chosen: torch.Tensor | None = None,
        probes: torch.Tensor | None = None,
        carry: Carry | None = None,
    ) -> torch.Tensor:
        """Compute the new text, or what is chosen and the question; see `paid`.

        Args:
            kv: written to.
            chosen: positions.
            probes: positions whose attention is wanted; None: the question's.
            carry: see `Decoder.compute`; of the chosen ones.
        """
        positions = self.new if chosen is None else self._with_question(chosen)
        probes = self.question if probes is None else probes
        paid = Paid(torch.isin(positions, probes), LAST_PROBES)
        self.decoder.compute(kv, self._ids(positions), positions, logits=0, paid=paid, carry=carry)
        return torch.stack(paid.sums)

    def answered(
        self,
        chosen: torch.Tensor,
        kv: KV | None = None,
        further: float = 0.0,
        carry: Carry | None = None,
    ) -> Answered:
        """What the model says where these tokens are recomputed.

        Args:
            chosen: positions of reused tokens that are recomputed beside the question.
            kv: of the prompt; None: as the first reading left it. Not written to.
            further, carry: see `Decoder.compute`; of the chosen ones.
        """
        positions = self._with_question(chosen)
        said = self.asked.answer[:-1]
        behind = torch.arange(len(self.asked.tokens), len(self.asked.tokens) + len(said))
        shares = None
        if further:
            shares = torch.zeros(len(positions) + len(said), dtype=torch.float32)
            shares[: len(positions)][torch.isin(positions, chosen)] = further
        kv = (kv or self.kv).copy()
        logits = self.decoder.compute(
            kv,
            torch.cat([self._ids(positions), torch.tensor(said, dtype=torch.int64)]),
            torch.cat([positions, behind]),
            logits=len(self.asked.answer),
            further=shares,
            carry=carry,
        )
        return Answered(logits, kv, len(self.asked.tokens), self.decoder)

    def best(self, scores: torch.Tensor, number: int) -> torch.Tensor:
        """Positions of the reused tokens of the largest scores, ascending.

        Args:
            scores: `[tokens]`.
        """
        ranked = scores.masked_fill(~self.is_document, float("-inf"))
        order = torch.sort(ranked, descending=True, stable=True).indices
        return order[: min(number, self.num_reused)].sort().values

    def _with_question(self, chosen: torch.Tensor) -> torch.Tensor:
        return torch.cat([chosen, self.question]).sort().values

    def _ids(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.asked.tokens)[positions]


def _where(tokens: Sequence[int], texts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    found, behind = [], 0
    for text in texts:
        first = _find(tokens, text, behind)
        behind = first + len(text)
        found.append((first, behind))
    return found


def _find(tokens: Sequence[int], text: Sequence[int], start: int = 0) -> int:
    """Where a text begins, from `start` on; -1 where it does not."""
    text = list(text)
    for first in range(start, len(tokens) - len(text) + 1):
        if tokens[first] == text[0] and list(tokens[first : first + len(text)]) == text:
            return first
    return -1


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    number = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        number += 1
    return number
