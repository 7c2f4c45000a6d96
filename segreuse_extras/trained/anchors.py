# SPDX-License-Identifier: Apache-2.0
"""Compressed documents of a model that was trained on them: anchors stand for the text.

    computed   start  c c c c a1 a2 | c c c c a1 a2 | c c a1 | end      chunks of 4, 2 anchors each
    prompt     start          a1 a2           a1 a2       a1   end      links, question

Behind each chunk of a document stand anchors. Text and anchors of a chunk attend to each other, to
the start token and to the anchors of earlier chunks. Only the anchors' KV is kept, and moved to
where it stands in a prompt. This is AnLLM's compression as KVLink has it (Yang et al., 2025); that
the text of a chunk sees earlier anchors, too, makes each chunk a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self


class AnchorNames(NamedTuple):
    """What `config.json` says of anchors.

    Attributes:
        chunk_tokens: tokens of a chunk.
        anchor_tokens: anchors of a whole chunk.
        anchor_token: their text, with `{index}`, from 1.
    """

    chunk_tokens: int
    anchor_tokens: int
    anchor_token: str = "<|anchor_{index}|>"

    @classmethod
    def parse(cls, value: Any) -> Self:
        """What the key `anchors` of the layout says.

        Raises:
            ValueError: it is something else; says what.
        """
        if not isinstance(value, Mapping) or value.keys() != set(cls._fields):
            raise ValueError(f"must be a mapping with {', '.join(cls._fields)}, not {value!r}")
        found = cls(**value)
        numbers = (found.chunk_tokens, found.anchor_tokens)
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(f"has {numbers} tokens of a chunk and anchors: both must be positive")
        if found.anchor_tokens > found.chunk_tokens:
            raise ValueError(f"has more anchors than tokens of a chunk: {numbers[1]}, {numbers[0]}")
        if not isinstance(found.anchor_token, str) or "{index}" not in found.anchor_token:
            raise ValueError(f"has anchor_token={found.anchor_token!r}, which lacks {{index}}")
        return found

    @property
    def texts(self) -> tuple[str, ...]:
        """All anchor tokens."""
        indices = range(1, self.anchor_tokens + 1)
        return tuple(self.anchor_token.replace("{index}", str(index)) for index in indices)


class Anchors(NamedTuple):
    """In token ids.

    Attributes:
        chunk_tokens: tokens of a chunk; the last one of a document may have fewer.
        tokens: anchors of a whole chunk.
    """

    chunk_tokens: int
    tokens: tuple[int, ...]

    def behind(self, size: int) -> tuple[int, ...]:
        """Those of a chunk of `size` tokens, in proportion, at least one."""
        return self.tokens[: -(-size * len(self.tokens) // self.chunk_tokens)]

    def chunks(self, text: Sequence[int]) -> Iterator[tuple[Sequence[int], tuple[int, ...]]]:
        """A document's text cut into chunks, each with its anchors."""
        for place in range(0, len(text), self.chunk_tokens):
            chunk = text[place : place + self.chunk_tokens]
            yield chunk, self.behind(len(chunk))

    def standing_for(self, size: int) -> list[int]:
        """What stands in a prompt for a text of `size` tokens."""
        return [anchor for _, anchors in self.chunks(range(size)) for anchor in anchors]
