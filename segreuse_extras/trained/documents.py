# SPDX-License-Identifier: Apache-2.0
"""Documents of a knowledge base whose model was trained on documents computed alone.

Requests of such a model find a document between its start and end token, computed from position 0
on: it stands behind nothing, is not cut, and is padded as requests pad it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from segreuse_extras.trained.anchoring import AnchoredShape, Anchoring
from segreuse_extras.trained.folder import layout_of, names_of
from segreuse_extras.trained.layout import Layout, Names, padded
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.errors import InvalidError
from vllm_segreuse.features.knowledge.isolated import IsolatedDocuments
from vllm_segreuse.features.knowledge.store import BaseRecord, Tokens

ALONE = "this model was trained on documents computed alone"


class LaidOutDocuments(IsolatedDocuments):
    """Of one model.

    Args:
        names, layout: how prompts of the model are laid out.
        encode: tokens of a text; special tokens in it are these tokens.
    """

    def __init__(self, names: Names, layout: Layout, encode: Callable[[str], list[int]]) -> None:
        self._names = names
        self._layout = layout
        self._encode = encode

    @classmethod
    def of(cls, model_config: Any, encode: Callable[[str], list[int]]) -> Self | None:
        """Those of a model; None: an ordinary one."""
        names = names_of(model_config)
        if names is None:
            return None
        layout = layout_of(model_config)
        assert layout is not None  # a model with names has one
        return cls(names, layout, encode)

    def check(self, base: BaseRecord) -> None:
        if base.context != "none":
            raise InvalidError(f"{ALONE}: create the base with context none", "context")
        if base.preamble:
            raise InvalidError(f"{ALONE}: create the base without a preamble", "preamble")

    def tokens(self, text: str | None, token_ids: Sequence[int] | None, where: str) -> list[int]:
        start, end = self._layout.start, self._layout.end
        if token_ids is not None:
            tokens, what = [start, *token_ids, end], f"{where}.token_ids"
        else:
            # As the chat template writes it: a text may be cut otherwise where it stands alone.
            around = self._names.document_start, self._names.document_end
            tokens, what = self._encode(f"{around[0]}{text}{around[1]}"), f"{where}.text"
        special = [i for i, token in enumerate(tokens) if token in self._layout.special]
        if special != [0, len(tokens) - 1] or (tokens[0], tokens[-1]) != (start, end):
            raise InvalidError("it has special tokens of documents: remove them", what)
        if len(tokens) == 2:
            raise InvalidError("the text has no tokens", what)
        return tokens

    def shape(self, shape: Shape) -> Shape:
        anchors = self._layout.anchors
        if anchors is None:
            return WholeShape(*shape)
        return AnchoredShape(*shape._replace(stand_ins=Anchoring(anchors)))


documents_of = LaidOutDocuments.of
"""Those of a model; None: an ordinary one."""


class WholeShape(Shape):
    """Of documents that stand for themselves: one prompt each, with one token more than its blocks
    have."""

    def num_chunks(self, num_context: int, num_tokens: int) -> int:
        alone = len(padded(range(num_tokens), self.block_size))
        if alone > self.max_prompt_tokens:
            raise InvalidError(
                f"a document of {num_tokens} tokens takes {alone} where it is computed alone, "
                f"and prompts have {self.max_prompt_tokens} at most: cut it into several",
                "documents",
            )
        return 1

    def prompts(self, context: Tokens, tokens: Tokens) -> list[Tokens]:
        return [np.array(padded(tokens.tolist(), self.block_size), np.int32)]
