# SPDX-License-Identifier: Apache-2.0
"""How a prompt of a model trained on isolated documents is laid out.

    text <start> document 1 <end> link_1_1 .. link_1_K <start> document 2 <end> link_2_1 .. question

A document, with its start and end token, attends to itself only, from position 0 on. Everything
else attends to all that stands in front of it. K may be 0 (Block-Attention). The layout is that of
KVLink (Yang et al., 2025); the model's `config.json` says what the tokens are called. With anchors,
every document is compressed: anchors stand in the place of its text (`anchors.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Self

from segreuse_extras.trained.anchors import AnchorNames, Anchors
from vllm_segreuse.model.documents import KEY

MOST_TOKENS = 1 << 16
"""More link tokens than this are no reasonable vocabulary."""


class LayoutError(ValueError):
    """A model's folder contradicts itself, or a prompt is not laid out as the model was trained."""


class Span(NamedTuple):
    """A document of a prompt: tokens `[start, stop)`, its start and end token included."""

    start: int
    stop: int


def blocks_needed(
    tokens: Sequence[int], spans: Iterable[Span], block_size: int, num_slots: int
) -> int:
    """KV blocks that a prompt and its documents take at a time; equal documents are one.

    Args:
        tokens: of the prompt.
        spans: of its documents.
        num_slots: that vLLM takes for the prompt, with what follows it (`KvSlots`).
    """
    blocks = -(-num_slots // block_size)
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
        anchors: of compressed documents; None: documents are whole.
    """

    link_tokens: int
    max_documents: int
    document_start: str
    document_end: str
    link_token: str
    anchors: AnchorNames | None = None

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
        given = {"anchors": None, **value}
        known = {field.name for field in fields(cls)} | {"isolated_documents"}
        if wrong := sorted(known ^ given.keys()):
            fault = "lacks" if wrong[0] in known else "has the unknown key"
            raise LayoutError(f"{KEY} in config.json {fault} {wrong[0]!r}")
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
        try:
            if given["anchors"] is not None:
                given["anchors"] = AnchorNames.parse(given["anchors"])
        except ValueError as error:
            raise LayoutError(f"{KEY}.anchors in config.json {error}") from None
        names = cls(**given)
        if names.link_tokens * names.max_documents > MOST_TOKENS:
            raise LayoutError(f"{KEY} in config.json wants more than {MOST_TOKENS} link tokens")
        return names

    def block(self) -> dict[str, Any]:
        """What `of_config` reads."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        block = {"isolated_documents": True, **said}
        block["anchors"] = None if self.anchors is None else self.anchors._asdict()
        return {key: value for key, value in block.items() if value is not None}

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """All of its tokens: start, end, the links of each document, then the anchors."""
        indices = range(1, self.link_tokens + 1)
        numbers = range(1, self.max_documents + 1)
        links = (self.link(number, index) for number in numbers for index in indices)
        anchors = () if self.anchors is None else self.anchors.texts
        return (self.document_start, self.document_end, *links, *anchors)

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
        anchors = None
        if self.anchors is not None:
            of_chunk = tuple(rest[self.max_documents * self.link_tokens :])
            anchors = Anchors(self.anchors.chunk_tokens, of_chunk)
        return Layout(start, end, per_document, anchors)


@dataclass(frozen=True)
class Layout:
    """Token ids of a layout.

    Attributes:
        start, end: around each document.
        links: behind the n-th document of a prompt, for each n.
        anchors: what documents consist of; None: of text.
    """

    start: int
    end: int
    links: tuple[tuple[int, ...], ...]
    anchors: Anchors | None = None

    @cached_property
    def special(self) -> frozenset[int]:
        """All of its tokens, which no text may hold."""
        return self._around | frozenset(self.anchors.tokens if self.anchors else ())

    @cached_property
    def _around(self) -> frozenset[int]:
        links = (link for links in self.links for link in links)
        return frozenset((self.start, self.end, *links))

    def spans(self, tokens: Sequence[int]) -> tuple[Span, ...]:
        """The documents of a prompt, in order.

        Raises:
            LayoutError: the prompt is not laid out as the model was trained; says where.
        """
        places = deque(i for i, token in enumerate(tokens) if token in self._around)
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
        if self.anchors is not None:
            self._check_anchors(tokens, spans)
        return tuple(spans)

    def _check_anchors(self, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        """Documents consist of anchors, and nothing else has any."""
        assert self.anchors is not None
        anchors = frozenset(self.anchors.tokens)
        inside = {place for start, stop in spans for place in range(start + 1, stop - 1)}
        for number, (start, stop) in enumerate(spans, 1):
            if not anchors.issuperset(tokens[start + 1 : stop - 1]):
                raise LayoutError(
                    f"document {number} is a text, and the model reads compressed documents only: "
                    "add it to a knowledge base, and name its base and id"
                )
        for place, token in enumerate(tokens):
            if token in anchors and place not in inside:
                raise self._misplaced(token, place, "outside of a document")

    def _misplaced(self, token: int, place: int, where: str) -> LayoutError:
        kinds = {self.start: "a start token", self.end: "an end token"}
        if self.anchors is not None:
            kinds |= dict.fromkeys(self.anchors.tokens, "an anchor token")
        return LayoutError(
            f"token {place} of the prompt is {kinds.get(token, 'a link token')} {where}: texts "
            "must not contain the special tokens of documents"
        )
