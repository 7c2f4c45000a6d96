# SPDX-License-Identifier: Apache-2.0
"""Examples asked about compressed documents of a knowledge base, through the engine.

`Condensed`: a model that was trained on anchors. `Dropped`: an ordinary model, a share of the
tokens of each document kept (`kb add --keep`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from bench import harness
from bench.quality import language
from bench.quality.isolated import (
    Asked,
    Isolated,
    Reference,
    generate_all,
    outcome,
)
from bench.quality.tasks import Example
from segreuse_extras.trained.layout import Layout
from vllm_segreuse.features.knowledge.naming import NamedDocument
from vllm_segreuse.features.knowledge.schemas import NewDocument
from vllm_segreuse.serve.offline import KnowledgeBase

BASE = "bench"


class Documents:
    """Documents of examples in a knowledge base.

    Args:
        keep: share of the tokens that is kept; None: the model's anchors stand for them.

    Attributes:
        held_share: tokens whose KV is held, of those of the texts.
    """

    def __init__(self, llm: Any, keep: float | None = None) -> None:
        self._base = KnowledgeBase(llm, BASE, context="none")
        self._keep = keep
        self._held = self._whole = 0

    @property
    def held_share(self) -> float:
        return self._held / self._whole

    def named(self, examples: Sequence[Example]) -> list[list[NamedDocument]]:
        """Of each example, once all of them are warm; those asked before are deleted."""
        self._base.remove(*(document.id for document in self._base.documents()))
        ids = [
            [f"{number}-{place}" for place in range(len(example.documents))]
            for number, example in enumerate(examples)
        ]
        added = self._base.add(
            [
                NewDocument(id=name, token_ids=language.encode(text), keep=self._keep)
                for example, names in zip(examples, ids, strict=True)
                for name, text in zip(names, example.documents, strict=True)
            ]
        )
        if wrong := [document for document in added if document.status != "warm"]:
            raise harness.BenchError(f"a document is not compressed: {wrong[0].error}")
        found = [[self._base.named(name) for name in names] for names in ids]
        around = 0 if self._keep else 2
        self._held += sum(len(it.tokens) + around for documents in found for it in documents)
        self._whole += sum(len(language.encode(t)) for e in examples for t in e.documents)
        return found


def asking(documents: Sequence[NamedDocument]) -> dict[str, Any]:
    """Extra arguments of a request that names them."""
    return {"extra_keys": [BASE], "segreuse_documents": [document.entry for document in documents]}


class Condensed(Isolated):
    """Documents that anchors stand for."""

    def __init__(self, llm: Any, layout: Layout) -> None:
        super().__init__(llm, layout)
        self.documents = Documents(llm)

    def prepared(self, examples: Sequence[Example]) -> list[tuple[list[int], Mapping[str, Any]]]:
        return [
            (self.prompt(example, [it.tokens.tolist() for it in named]), asking(named))
            for example, named in zip(examples, self.documents.named(examples), strict=True)
        ]

    def share_of(self, example: Example, prompt: Sequence[int]) -> float:
        return len(prompt) / len(self.prompt(example))

    def wanted(
        self, example: Example, prompt: Sequence[int], answer: Sequence[int], reference: Reference
    ) -> list[float]:
        assert isinstance(reference, AnchorReference)
        texts = [language.encode(document) for document in example.documents]
        head, tail = language.encode(example.prefix), language.encode(example.suffix)
        return reference.of_documents(head, texts, tail, answer)


class Dropped:
    """Documents some of whose tokens are kept, of an ordinary model; nothing else is reused."""

    def __init__(self, llm: Any, keep: float) -> None:
        self._llm = llm
        self.documents = Documents(llm, keep)

    def ask(self, examples: Sequence[Example], timed: bool = False) -> list[Asked]:
        """The answers; see `Isolated.ask`."""
        prompts, given = [], []
        for example, named in zip(examples, self.documents.named(examples), strict=True):
            inside = [token for document in named for token in document.tokens.tolist()]
            head, tail = language.encode(example.prefix), language.encode(example.suffix)
            prompts.append([*head, *inside, *tail])
            given.append({**asking(named), "segreuse_policy": "shift"})
        words = [len(example.answer) for example in examples]
        answers = generate_all(self._llm, prompts, words, given, timed)
        found = []
        for example, prompt, (output, ms) in zip(examples, prompts, answers, strict=True):
            told = (output.kv_transfer_params or {}).get("segreuse") or {}
            if not told.get("reused_tokens"):
                raise harness.BenchError(f"kept tokens were not reused, and the report is {told}")
            share = len(prompt) / len(language.encode(example.prompt))
            found.append(outcome(example, output, ms, told["computed_share"] * share))
        return found


class AnchorReference(Reference):
    """The model in plain torch, chunk by chunk; what anchors stand for is seen by them alone."""

    def of_documents(
        self,
        head: Sequence[int],
        documents: Sequence[Sequence[int]],
        question: Sequence[int],
        answer: Sequence[int],
    ) -> list[float]:
        """Log-probability of each token of the answer.

        Args:
            head: tokens in front of the documents.
            documents: text of each.
            question: tokens behind them.
        """
        import torch
        from transformers import DynamicCache

        cache, place = DynamicCache(), len(head)
        if head:
            self._run(cache, head, 0)
        for number, text in enumerate(documents):
            condensed = self._condensed(text)
            for layer, found in enumerate(condensed.layers):
                cache.update(self._turned(found.keys, place), found.values, layer)
            place += condensed.get_seq_length()
            for link in self._layout.links[number]:
                self._run(cache, [link], place)
                place += 1
        logits = self._run(cache, [*question, *answer], place)[len(question) - 1 : -1]
        found = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        values: list[float] = found.tolist()
        return values

    def _condensed(self, text: Sequence[int]) -> Any:
        """KV of what stands for a document, from position 0 on."""
        from transformers import DynamicCache

        assert self._layout.anchors is not None
        kept, place = DynamicCache(), 1
        self._run(kept, [self._layout.start], 0)
        for chunk, behind in self._layout.anchors.chunks(text):
            whole, count = copy.deepcopy(kept), len(behind)
            self._run(whole, [*chunk, *behind], place)
            for layer, found in enumerate(whole.layers):
                keys = self._turned(found.keys[:, :, -count:], -len(chunk))
                kept.update(keys, found.values[:, :, -count:], layer)
            place += count
        self._run(kept, [self._layout.end], place)
        return kept

    def _run(self, cache: Any, tokens: Sequence[int], place: int) -> Any:
        import torch

        where = torch.arange(place, place + len(tokens))[None]
        with torch.no_grad():
            ids = torch.tensor([list(tokens)])
            out = self._model(ids, position_ids=where, past_key_values=cache)
        return out.logits[0].float()

    def _turned(self, keys: Any, shift: int) -> Any:
        import torch

        cos, sin = self._model.get_decoder().rotary_emb(keys, torch.tensor([[shift]]))
        first, second = keys.chunk(2, -1)
        return keys * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
