# SPDX-License-Identifier: Apache-2.0
"""How a prompt of a model trained on isolated documents is laid out.

    text <start> document 1 <end> link_1_1 .. link_1_K <start> document 2 <end> link_2_1 .. question

A document, with its start and end token, attends to itself only, from position 0 on. Everything
else attends to all that stands in front of it. K may be 0 (Block-Attention). The layout is that of
KVLink (Yang et al., 2025); the model's `config.json` says what the tokens are called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

KEY = "segreuse"
"""Of `config.json`."""

MOST_TOKENS = 1 << 16
"""More link tokens than this are no reasonable vocabulary."""


class LayoutError(ValueError):
    """A model's folder contradicts itself, or a prompt is not laid out as the model was trained."""


class Span(NamedTuple):
    """A document of a prompt: tokens `[start, stop)`, its start and end token included."""

    start: int
    stop: int


def blocks_needed(
    tokens: Sequence[int], spans: Iterable[Span], block_size: int, num_tokens: int = 0
) -> int:
    """KV blocks that a prompt and its documents take at a time; equal documents are one.

    Args:
        tokens: of the prompt.
        spans: of its documents.
        num_tokens: of the prompt, with what follows it; 0: nothing does.
    """
    blocks = -(-(max(num_tokens, len(tokens)) + 1) // block_size)
    documents = {tuple(tokens[start:stop]): start for start, stop in reversed([*spans])}
    for document, start in documents.items():
        # A document at the start is its own prefix, but for a block that is not full.
        full, rest = divmod(len(document), block_size)
        blocks += (rest > 0) + (full if start else 0)
    return blocks


def padded(tokens: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Tokens up to a whole number of blocks, and one more.

    What follows a token does not change its KV. vLLM always computes the last token of a prompt:
    with one behind the last block, all blocks that another namespace has computed are shared.
    """
    return (*tokens, *(tokens[-1],) * (1 + -len(tokens) % block_size))


@dataclass(frozen=True)
class Names:
    """What `config.json` says.

    Attributes:
        link_tokens: K, behind each document.
        max_documents: of a prompt; there are link tokens for so many.
        document_start, document_end: special tokens around a document.
        link_token: of a link token, with `{document}` and `{index}`, both from 1.
    """

    link_tokens: int
    max_documents: int
    document_start: str
    document_end: str
    link_token: str

    @classmethod
    def of_config(cls, value: Any) -> Self | None:
        """What the key `segreuse` of a model's `config.json` says; None: an ordinary model.

        Raises:
            LayoutError: it says something else than a layout.
        """
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise LayoutError(f"{KEY} in config.json is {value!r}, and must be a mapping")
        known = {field.name for field in fields(cls)} | {"isolated_documents"}
        if wrong := sorted(known ^ value.keys()):
            fault = "lacks" if wrong[0] in known else "has the unknown key"
            raise LayoutError(f"{KEY} in config.json {fault} {wrong[0]!r}")
        given = dict(value)
        if given.pop("isolated_documents") is not True:
            raise LayoutError(f"{KEY}.isolated_documents in config.json must be true")
        for name in ("link_tokens", "max_documents"):
            least = 0 if name == "link_tokens" else 1
            if type(given[name]) is not int or not least <= given[name] <= MOST_TOKENS:
                raise LayoutError(
                    f"{KEY}.{name}={given[name]!r} in config.json must be an integer from {least} "
                    f"to {MOST_TOKENS}"
                )
        for name in ("document_start", "document_end", "link_token"):
            if not isinstance(given[name], str) or not given[name]:
                raise LayoutError(f"{KEY}.{name}={given[name]!r} in config.json must be a text")
        names = cls(**given)
        if names.link_tokens * names.max_documents > MOST_TOKENS:
            raise LayoutError(f"{KEY} in config.json wants more than {MOST_TOKENS} link tokens")
        return names

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """All of its tokens: start, end, then the links of each document."""
        indices = range(1, self.link_tokens + 1)
        numbers = range(1, self.max_documents + 1)
        links = (self.link(number, index) for number in numbers for index in indices)
        return (self.document_start, self.document_end, *links)

    def link(self, document: int, index: int) -> str:
        """The link token of a document and index, both from 1."""
        token = self.link_token.replace("{document}", str(document))
        return token.replace("{index}", str(index))

    def layout(self, token_id: Callable[[str], int | None]) -> Layout:
        """The layout in token ids.

        Args:
            token_id: of a special token; None: the tokenizer has no single token for it.

        Raises:
            LayoutError: names a token that the tokenizer lacks, or two that are the same.
        """
        ids: dict[int, str] = {}
        for text in self.texts:
            found = token_id(text)
            if found is None:
                raise LayoutError(
                    f"config.json promises the token {text!r}, and the tokenizer has no single "
                    "token for it: add it as a special token, or correct config.json"
                )
            if found in ids:
                raise LayoutError(f"{text!r} and {ids[found]!r} are one token of the tokenizer")
            ids[found] = text
        start, end, *rest = ids
        per_document = tuple(
            tuple(rest[d * self.link_tokens : (d + 1) * self.link_tokens])
            for d in range(self.max_documents)
        )
        return Layout(start, end, per_document)


@dataclass(frozen=True)
class Layout:
    """Token ids of a layout.

    Attributes:
        start, end: around each document.
        links: behind the n-th document of a prompt, for each n.
    """

    start: int
    end: int
    links: tuple[tuple[int, ...], ...]

    @cached_property
    def special(self) -> frozenset[int]:
        """All of its tokens."""
        return frozenset((self.start, self.end, *(link for links in self.links for link in links)))

    def spans(self, tokens: Sequence[int]) -> tuple[Span, ...]:
        """The documents of a prompt, in order.

        Raises:
            LayoutError: the prompt is not laid out as the model was trained; says where.
        """
        places = deque(i for i, token in enumerate(tokens) if token in self.special)
        spans: list[Span] = []
        while places:
            start = places.popleft()
            if tokens[start] != self.start:
                raise self._misplaced(tokens[start], start, "outside of a document")
            number = len(spans) + 1
            if number > len(self.links):
                raise LayoutError(
                    f"the prompt has more than {len(self.links)} documents, and the model has "
                    "link tokens for so many only: send fewer"
                )
            if not places:
                raise LayoutError(f"document {number} has no end token")
            stop = places.popleft() + 1
            if tokens[stop - 1] != self.end:
                raise self._misplaced(tokens[stop - 1], stop - 1, f"inside document {number}")
            links = self.links[number - 1]
            if tuple(tokens[stop : stop + len(links)]) != links:
                raise LayoutError(
                    f"behind document {number}, from token {stop} of the prompt on, its "
                    f"{len(links)} link tokens must follow in their order"
                )
            for _ in links:
                places.popleft()
            spans.append(Span(start, stop))
        if spans and spans[-1].stop == len(tokens):
            raise LayoutError("the prompt ends with a document: add a question")
        return tuple(spans)

    def _misplaced(self, token: int, place: int, where: str) -> LayoutError:
        kinds = {self.start: "a start token", self.end: "an end token"}
        return LayoutError(
            f"token {place} of the prompt is {kinds.get(token, 'a link token')} {where}: texts "
            "must not contain the special tokens of documents"
        )
