# SPDX-License-Identifier: Apache-2.0
"""DocumentTexts of documents and the tokens that are made of them."""

from __future__ import annotations

import numpy as np

from vllm_segreuse.features.knowledge import schemas
from vllm_segreuse.features.knowledge.catalogue import CatalogueBase
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.compression import CompressionSettings, why_not_compressed
from vllm_segreuse.features.knowledge.engine import Engine
from vllm_segreuse.features.knowledge.errors import InvalidError
from vllm_segreuse.features.knowledge.isolated import IsolatedDocuments
from vllm_segreuse.features.knowledge.store import BaseRecord, DocumentRecord, Tokens


class DocumentTexts:
    """Of one engine. Its methods block: they run beside the event loop.

    Args:
        engine: has the tokenizer.
        shape: how documents are cut.
        isolated: documents of a model that was trained on documents computed alone; None: of an
            ordinary one.
    """

    def __init__(self, engine: Engine, shape: Shape, isolated: IsolatedDocuments | None) -> None:
        self._engine, self._shape, self._isolated = engine, shape, isolated

    @property
    def default_context(self) -> schemas.Context:
        """Of a base that names none."""
        return "siblings" if self._isolated is None else "none"

    def context(self, base: BaseRecord) -> Tokens:
        """Tokens before every document of a base."""
        if self._isolated is not None:
            self._isolated.check(base)
            return np.empty(0, np.int32)
        preamble = self._engine.encode(base.preamble) if base.preamble else []
        return np.array(self._engine.start_tokens() + preamble, np.int32)

    def records(
        self, base: CatalogueBase, documents: list[schemas.NewDocument]
    ) -> list[DocumentRecord]:
        """Documents that are to be added to a base, without contexts and entries.

        Raises:
            InvalidError: one has no tokens, or such as the model has not; or is to be compressed
                where none can be.
        """
        records = []
        for i, document in enumerate(documents):
            ids = self._tokens(document, f"documents.{i}")
            if max(ids) >= self._engine.vocab_size:
                raise InvalidError(
                    f"token {max(ids)} is none of this model's {self._engine.vocab_size}",
                    f"documents.{i}.token_ids",
                )
            tokens = np.array(ids, np.int32)
            name = base.record.name
            how = None
            if document.keep is not None:
                if self._isolated is not None:
                    raise InvalidError(
                        "this model was trained on documents computed alone (segreuse in its "
                        "config.json), and cannot read a part of one: add it without keep",
                        f"documents.{i}.keep",
                    )
                if why_not := why_not_compressed(self._shape.stages):
                    raise InvalidError(why_not, f"documents.{i}.keep")
                how = CompressionSettings(document.keep, document.scorer or "attention")
            record = DocumentRecord(
                *(name, document.id, base.context, tokens, document.metadata, ""), compression=how
            )
            records.append(record)
        return records

    def _tokens(self, document: schemas.NewDocument, where: str) -> list[int]:
        if self._isolated is not None:
            tokens = self._isolated.tokens(document.text, document.token_ids, where)
            self._shape.num_chunks(0, len(tokens))
            return tokens
        ids = document.token_ids
        if ids is None:
            ids = self._engine.encode(document.text or "")
        if not ids:
            raise InvalidError("the text has no tokens", f"{where}.text")
        return ids

    def shown(self, record: DocumentRecord) -> schemas.DocumentText:
        """What was made of a document, which requests must contain."""
        tokens: list[int] = record.tokens.tolist()
        if self._isolated is not None:
            tokens = tokens[1:-1]  # what tells the model that it is a document
        text = self._engine.decode(tokens)
        return schemas.DocumentText(
            id=record.id,
            base=record.base,
            text=text,
            is_exact=text is not None and self._engine.encode(text) == tokens,
            token_ids=tokens,
        )
