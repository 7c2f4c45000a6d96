# SPDX-License-Identifier: Apache-2.0
"""Documents of a model that was trained on documents computed alone: behind nothing, and not cut.

A feature with a file `documents.py` knows how they are made (`segreuse_extras/trained/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm_segreuse.features import having
from vllm_segreuse.features.knowledge.engine import Engine
from vllm_segreuse.features.knowledge.store import BaseRecord, Tokens
from vllm_segreuse.plan import FreezeOrder

if TYPE_CHECKING:
    from vllm_segreuse.features.knowledge.chunks import Shape


class StandIns(Protocol):
    """What stands for documents, of a model that reads compressed ones only."""

    def standing_for(self, num_tokens: int) -> list[int]:
        """What stands in a prompt for a text of so many tokens."""

    async def freeze(
        self, engine: Engine, extra_key: str, tokens: Tokens, order: FreezeOrder
    ) -> bool:
        """Compute a document, and freeze what stands for it.

        Args:
            tokens: of the document, its start and end token included.
            order: to freeze it.

        Returns:
            Whether it is frozen.

        Raises:
            NotFrozenError: it is not, for this reason.
        """


class IsolatedDocuments(Protocol):
    """Of one model."""

    def check(self, base: BaseRecord) -> None:
        """A base puts nothing in front of its documents.

        Raises:
            InvalidError: this one does.
        """

    def tokens(self, text: str | None, token_ids: Sequence[int] | None, where: str) -> list[int]:
        """A document's tokens, with its start and end token.

        Args:
            where: the document in the request.

        Raises:
            InvalidError: it holds special tokens of documents itself.
        """

    def shape(self, shape: Shape) -> Shape:
        """How they become prompts, in an engine where others do by `shape`."""


def isolated_documents(
    model_config: Any, encode: Callable[[str], list[int]]
) -> IsolatedDocuments | None:
    """Those of a model; None: an ordinary one.

    Args:
        encode: tokens of a text; special tokens in it are these tokens.
    """
    for module in having("documents"):
        found: IsolatedDocuments | None = module.documents_of(model_config, encode)
        if found is not None:
            return found
    return None
