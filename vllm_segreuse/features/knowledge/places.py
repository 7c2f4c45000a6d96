# SPDX-License-Identifier: Apache-2.0
"""Where documents stand in a prompt whose request names them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def places(prompt: Sequence[int] | Tokens, documents: Iterable[Tokens]) -> list[int | None]:
    """Where each document begins, in this order; None where it does not stand behind the ones
    before it.

    Token ids are searched for as characters: Python's search takes linear time, whatever they are.

    Args:
        prompt: token ids.
        documents: token ids of each, none of them empty.

    Raises:
        ValueError: a token id is out of the range of characters, which is larger than vocabularies.
    """
    text, begin = _characters(prompt), 0
    found: list[int | None] = []
    for tokens in documents:
        place = text.find(_characters(tokens), begin)
        found.append(None if place < 0 else place)
        if place >= 0:
            begin = place + len(tokens)
    return found


def _characters(tokens: Sequence[int] | Tokens) -> str:
    try:
        return np.asarray(tokens, "<u4").tobytes().decode("utf-32-le", "surrogatepass")
    except (OverflowError, UnicodeDecodeError):
        raise ValueError(f"a token id is not in 0 to {sys.maxunicode}") from None
