# SPDX-License-Identifier: Apache-2.0
"""Documents of a base whose model was trained on documents computed alone.

Requests of such a model find a document between its start and end token, computed from position 0
on: it stands behind nothing, and is not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from vllm_segreuse.features.knowledge.errors import InvalidError
from vllm_segreuse.features.knowledge.store import BaseRecord
from vllm_segreuse.model.documents.anchors import Anchors
from vllm_segreuse.model.documents.folder import layout_of, names_of
from vllm_segreuse.model.documents.layout import Layout, Names

ALONE = "this model was trained on documents computed alone"


class IsolatedDocuments:
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

    @property
    def anchors(self) -> Anchors | None:
        """What stands for documents; None: they stand for themselves."""
        return self._layout.anchors

    def check(self, base: BaseRecord) -> None:
        """A base puts nothing in front of its documents.

        Raises:
            InvalidError: this one does.
        """
        if base.context != "none":
            raise InvalidError(f"{ALONE}: create the base with context none", "context")
        if base.preamble:
            raise InvalidError(f"{ALONE}: create the base without a preamble", "preamble")

    def tokens(self, text: str | None, token_ids: Sequence[int] | None, where: str) -> list[int]:
        """A document's tokens, with its start and end token.

        Args:
            where: the document in the request.

        Raises:
            InvalidError: it holds special tokens of documents itself.
        """
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
