# SPDX-License-Identifier: Apache-2.0
"""Tokens as the similarity index sees them: case, white space and changing values do not count.

    tokens     {"  price  ":   1  2  .  5  0  ,   "  At  ":  "  2  0  2  6  -  0  1  "  }
    canonical  "   price  "    #                  "   at  "  #                       "

It happens on token ids, with a table that is made once from the texts of the vocabulary: the
scheduler's process has no text. What is executed, and reused, is always the token itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_segreuse.cache.jit import kernel
from vllm_segreuse.plan import IntArray

KindArray = npt.NDArray[np.uint8]

# Bits of a token's kind.
BLANK = 1  # white space only: omitted
PUNCTUATION = 2  # one class; a run of them counts once
VOLATILE = 4  # matches one of the patterns
LETTERS = 8  # may be part of a hexadecimal id or of a timestamp
JOINER = 16  # punctuation that may be within a number, a timestamp or an id
SPACED = 32  # begins with white space, so that nothing before it is joined to it

# Classes that no token has alone; those of texts and of unknown tokens are above.
_VALUE, _PUNCTUATION, _FIRST = 0, 1, 2

_LETTERS = re.compile(r"[0-9a-fA-F]{1,8}|[TZx]")
_JOINER = re.compile(r"[-.,:/+_]{1,2}")
_NO_WORD = re.compile(r"[\W_]+")


class Vocabulary(NamedTuple):
    """What the tokens of a model are compared by.

    Attributes:
        classes: int32 `[vocabulary]`, the class of each token id; others are classes of their own.
        kinds: uint8 `[vocabulary]`, bits as above.
        anchors: canonical classes of each text at which a segment begins.
    """

    classes: IntArray
    kinds: KindArray
    anchors: tuple[IntArray, ...] = ()

    @classmethod
    def of_texts(cls, texts: Sequence[str], volatile: Sequence[str]) -> Vocabulary:
        """Classes by text: stripped and without case.

        Args:
            texts: of each token id; white space in front is part of it. "" for a token that has
                none of its own, as a part of a character.
            volatile: regular expressions; a token whose stripped text one of them matches fully is
                a changing value.
        """
        patterns = [re.compile(pattern) for pattern in volatile]
        known: dict[str, int] = {}
        classes = np.arange(len(texts), dtype=np.int32) + _FIRST + len(texts)
        kinds = np.zeros(len(texts), np.uint8)
        for token, text in enumerate(texts):
            stripped = text.strip()
            if not text:
                continue
            kinds[token] = _kind(text, stripped, patterns)
            classes[token] = known.setdefault(stripped.casefold(), _FIRST + len(known))
        return cls(classes, kinds)

    @classmethod
    def of_identity(cls) -> Vocabulary:
        """Each token is a class of its own, as without a tokenizer."""
        return cls(np.empty(0, np.int32), np.empty(0, np.uint8))

    def with_anchors(self, anchors: Sequence[Sequence[int]]) -> Vocabulary:
        """The same, with the texts at which segments begin.

        Args:
            anchors: token ids of each.
        """
        canonical = (self.canonical(np.asarray(ids, np.int32))[0] for ids in anchors)
        return self._replace(anchors=tuple(ids for ids in canonical if ids.size))

    def canonical(self, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Classes of a text, and the position of the first token that each stands for.

        Args:
            tokens: int32 `[n]`.

        Returns:
            Both int32 `[at most n]`.
        """
        return _canonical(np.require(tokens, np.int32, ("C", "W")), self.classes, self.kinds)


def _kind(text: str, stripped: str, volatile: Sequence[re.Pattern[str]]) -> int:
    if not stripped:
        return BLANK
    kind = SPACED if text[0].isspace() else 0
    if any(pattern.fullmatch(stripped) for pattern in volatile):
        return kind | VOLATILE
    if _NO_WORD.fullmatch(stripped):
        return kind | PUNCTUATION | (JOINER if _JOINER.fullmatch(text) else 0)
    return kind | (LETTERS if _LETTERS.fullmatch(stripped) else 0)


@kernel
def _canonical(tokens: IntArray, classes: IntArray, kinds: KindArray) -> tuple[IntArray, IntArray]:
    ids, first = np.empty(tokens.size, np.int32), np.empty(tokens.size, np.int32)
    count, i, barren = 0, 0, 0  # up to `barren` no value begins
    while i < tokens.size:
        stop = i
        if i >= barren:
            stop, barren = _value_end(tokens, kinds, i)
        token, kind = tokens[i], np.uint8(0)
        if token < kinds.size:
            kind = kinds[token]
        if stop > i:
            ids[count], first[count] = _VALUE, i
            count += 1
            i = stop
            continue
        if kind & PUNCTUATION:
            if count == 0 or ids[count - 1] != _PUNCTUATION:
                ids[count], first[count] = _PUNCTUATION, i
                count += 1
        elif not kind & BLANK:
            ids[count] = classes[token] if token < classes.size else token + 2 * classes.size + 2
            first[count] = i
            count += 1
        i += 1
    return ids[:count].copy(), first[:count].copy()


@kernel
def _value_end(tokens: IntArray, kinds: KindArray, i: int) -> tuple[int, int]:
    """End of the changing value that begins at `i`, `i` if none does; and of the chain, before
    which no other begins either if none does here.

    A value is a chain of volatile tokens, letters and joiners without white space in between. It
    contains a volatile one, and neither begins nor ends with a joiner.
    """
    end, stop, is_value = i, i, False
    for at in range(i, tokens.size):
        token = tokens[at]
        if token >= kinds.size:
            break
        kind = kinds[token]
        if not kind & (VOLATILE | LETTERS | JOINER) or (at > i and kind & SPACED):
            break
        if at == i and kind & JOINER:
            break
        is_value |= (kind & VOLATILE) != 0
        if not kind & JOINER:
            end = at + 1
        stop = at + 1
    return (end, end) if is_value else (i, stop)
