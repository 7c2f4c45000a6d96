# SPDX-License-Identifier: Apache-2.0
"""An example as a row of tokens, laid out as the server lays a prompt out.

The prompt is what the folder's own chat template makes of documents and question, and documents are
found in it as the server finds them (`Layout.spans`). Questions about the same documents share one
row: they stand behind each other, and each at the position it would have in its own prompt.

    shared part             question 1      question 2
    d d d d l d d d l l     q q q a a       q q q q a
    0 1 2 3 4 5 6 7 8 9    10 ..           10 ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.kvlink.examples import DataError, Example
from segreuse_extras.trained.anchors import Anchors
from segreuse_extras.trained.layout import Layout, LayoutError

UNLEARNT = -100
"""Label of a token that is not to be learnt, as in transformers."""


@dataclass
class Row:
    """Tokens and all that is known of each; see `mask.Places` for what decides the mask.

    Attributes:
        position: for RoPE.
        shift: how far a token's key is moved from where it was computed (anchors: to the left).
        label: the token where it is to be learnt, else `UNLEARNT`.
    """

    token: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    document: list[int] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    anchor: list[int] = field(default_factory=list)
    shift: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token)

    def add(
        self,
        tokens: Sequence[int],
        position: int,
        document: int = 0,
        branch: int = 0,
        chunk: int = 0,
        shift: int = 0,
        learnt: bool = False,
    ) -> int:
        """Append tokens at contiguous positions; returns the position behind them."""
        count = len(tokens)
        self.token += tokens
        self.position += range(position, position + count)
        self.document += [document] * count
        self.branch += [branch] * count
        self.chunk += [chunk] * count
        self.anchor += [int(shift < 0)] * count
        self.shift += [shift] * count
        self.label += tokens if learnt else [UNLEARNT] * count
        return position + count


@dataclass(frozen=True)
class Writer:
    """Lays examples out.

    Attributes:
        tokenizer: of the folder, with its chat template and the layout's tokens.
        layout: of prompts.
        max_tokens: longest row; questions that do not fit into it are left out.
        anchors: of compressed documents; None: they are whole.
    """

    tokenizer: Any
    layout: Layout
    max_tokens: int
    anchors: Anchors | None = None

    def row(self, example: Example) -> Row:
        """The example's row.

        Raises:
            DataError: a text holds a token of the layout, there are more documents than link
                tokens, or the row is too long with its first question.
        """
        if example.text:
            return self._text_row(example)
        prompts = self.prompts(example)
        try:
            spans = self.layout.spans(prompts[0][0])
        except LayoutError as error:
            raise DataError(f"{example.where}: {error}") from None
        links = len(self.layout.links[0])
        shared = spans[-1].stop + links if spans else 0
        row, position = Row(), 0
        tokens, before = prompts[0][0], 0
        for number, (start, stop) in enumerate(spans, 1):
            position = row.add(tokens[before:start], position)
            position = self._document(row, tokens[start:stop], position, number)
            before = stop
        position = row.add(tokens[before:shared], position)
        for number, (prompt, answer) in enumerate(prompts, 1):
            left = self.max_tokens - len(row)
            if len(prompt) - shared + len(answer) > left:
                if number == 1:
                    raise DataError(
                        f"{example.where} takes {len(row) + len(prompt) - shared + len(answer)} "
                        f"tokens of a row, and it has {self.max_tokens}: shorten the line, or "
                        "raise --max-tokens"
                    )
                break
            if not spans and number > 1:
                break  # nothing is shared
            behind = row.add(prompt[shared:], position, branch=number)
            row.add(answer, behind, branch=number, learnt=True)
        return row

    def _document(self, row: Row, tokens: Sequence[int], position: int, number: int) -> int:
        """Append a document, its start and end token included."""
        if self.anchors is None:
            return row.add(tokens, position, number)
        start, *text, end = tokens
        position = row.add([start], position, number)
        for part, anchors in self.anchors.chunks(text):
            chunk = max(row.chunk) + 1
            behind = row.add(part, position, number, chunk=chunk)
            row.add(anchors, behind, number, chunk=chunk, shift=-len(part))
            position += len(anchors)
        return row.add([end], position, number)

    def _text_row(self, example: Example) -> Row:
        """Text learnt as it is; with anchors its first half is a document, the other is learnt."""
        tokens = self._encode(example.text, example.where)[: self.max_tokens]
        row = Row()
        if self.anchors is None:
            row.add(tokens, 0, learnt=True)
            return row
        half = len(tokens) // 2
        document = [self.layout.start, *tokens[:half], self.layout.end]
        position = self._document(row, document, 0, 1)
        position = row.add(self.layout.links[0], position)
        row.add(tokens[half:], position, branch=1, learnt=True)
        return row

    def prompts(self, example: Example) -> list[tuple[list[int], list[int]]]:
        """Prompt and answer of each question."""
        documents = list(example.documents)
        if example.segment:
            tokens = self._encode(documents[0], example.where)
            cuts = range(0, len(tokens), example.segment)
            documents = [self.tokenizer.decode(tokens[c : c + example.segment]) for c in cuts]
            documents = documents[: len(self.layout.links)]
        if example.isolated and len(documents) > len(self.layout.links):
            raise DataError(
                f"{example.where} has {len(documents)} documents, and there are link tokens for "
                f"{len(self.layout.links)} only: raise --max-documents, or send fewer"
            )
        for text in (*documents, example.system, *(part for one in example.asked for part in one)):
            self._encode(text, example.where)
        plain = "" if example.isolated else "\n".join(documents)
        prompts = []
        for question, answer in example.asked:
            asked = f"{plain}\n{question}" if plain else question
            messages = [{"role": "user", "content": asked}]
            if example.system:
                messages.insert(0, {"role": "system", "content": example.system})
            prompt = self.tokenizer.apply_chat_template(
                messages,
                documents=[{"text": text} for text in documents] if example.isolated else None,
                add_generation_prompt=True,
                tokenize=False,
            )
            learnt = self.tokenizer.encode(answer, add_special_tokens=False)
            if self.tokenizer.eos_token_id is not None:
                learnt.append(self.tokenizer.eos_token_id)
            prompts.append((self.tokenizer.encode(prompt, add_special_tokens=False), learnt))
        return prompts

    def _encode(self, text: str, where: str) -> list[int]:
        """Tokens of a text of the data.

        Raises:
            DataError: it holds a token of the layout.
        """
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        special = self.layout.special | set(self.anchors.tokens if self.anchors else ())
        if held := special.intersection(tokens):
            name = self.tokenizer.convert_ids_to_tokens(min(held))
            raise DataError(f"{where} holds {name!r}, which only a prompt's layout may")
        return tokens
