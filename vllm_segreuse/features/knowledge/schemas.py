# SPDX-License-Identifier: Apache-2.0
"""What the routes of knowledge bases take and answer, for server and clients alike.

Neither vLLM nor FastAPI is imported. A body that does not fit raises pydantic's `ValidationError`;
the server answers it with HTTP 400 and an `ErrorAnswer`. Of the elements of a list, and of unknown
fields, the error has the first that is wrong: a list of millions of them takes gigabytes.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from vllm_segreuse.options.keys import MAX_EXTRA_KEY_BYTES, key_fault

PREFIX = "/plugins/segreuse/v1"
"""Path before those of all routes."""

MAX_NAME_CHARS = 128
MAX_ID_BYTES = 512
MAX_METADATA_BYTES = 16 * 1024
MAX_PREAMBLE_CHARS = 100_000
MAX_DOCUMENTS = 1000
"""Documents in one request; also the largest page."""

Status = Literal["cold", "stored", "warming", "warm", "failed"]
"""`warm`: its KV is in GPU memory; `stored`: it is not, and requests reuse it from the second tier;
`cold`: it is nowhere, and `warm` brings it back; `warming`: it waits for its turn or is being
computed; `failed`: it cannot be served, see `error`."""

Tier = Literal["gpu", "host", "disk"]
"""Where KV is: the first of these that has all of it."""

Context = Literal["siblings", "none"]
"""What a document is computed behind, after the preamble: the beginnings of two other documents of
its base, or nothing."""

Scorer = Literal["attention", "surprise", "uniform"]
"""What says which tokens of a compressed document are kept
(`segreuse_extras/compressed/compress.py`)."""

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"must be 1 to {MAX_NAME_CHARS} letters, digits, '.', '_' and '-', "
            "and begin with a letter or digit"
        )
    return value


def _key(max_bytes: int = MAX_EXTRA_KEY_BYTES) -> AfterValidator:
    def check(value: str) -> str:
        fault = key_fault(value, max_bytes)
        if fault:
            raise ValueError(fault)
        return value

    return AfterValidator(check)


def _path_safe(value: str) -> str:
    if {".", ".."} & set(value.split("/")):
        raise ValueError("must have no '.' or '..' between slashes: URLs drop them")
    return value


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must hold no lone surrogates") from None
    return value


def _small(value: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from None
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"must be at most {MAX_METADATA_BYTES} bytes of JSON, not {size}")
    return value


BaseName = Annotated[str, AfterValidator(_name)]
DocumentId = Annotated[str, _key(MAX_ID_BYTES), AfterValidator(_path_safe)]
ExtraKey = Annotated[str, _key()]
Metadata = Annotated[dict[str, JsonValue], AfterValidator(_small)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Keep = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        first = next((name for name in value if name not in known), None)
        return {name: value[name] for name in value if name in known or name == first}


class CreateBase(_Request):
    """Body of `POST /knowledge-bases`."""

    name: BaseName
    extra_key: ExtraKey | None = None
    """Requests that name it as their `extra_keys` reuse the documents; None: the base's name."""
    preamble: Annotated[Text, Field(max_length=MAX_PREAMBLE_CHARS)] | None = None
    """Text before every document while it is computed; None: only the tokens that every sequence
    of this model starts with."""
    context: Context | None = None
    """None: `siblings` for a new base; one that exists is left as it is."""
    metadata: Metadata = {}


class NewDocument(_Request):
    """One document to add: text or token ids."""

    id: DocumentId
    text: Text | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    metadata: Metadata = {}
    keep: Keep | None = None
    """Share of its tokens whose KV is kept; requests then have to name it. None: all of it is
    kept, and found by its text."""
    scorer: Scorer | None = None
    """Says which tokens are kept; None: `attention`."""

    @model_validator(mode="after")
    def _one_content(self) -> Self:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("needs either text or token_ids")
        if self.scorer is not None and self.keep is None:
            raise ValueError("has a scorer and no keep: add the share of tokens to keep")
        return self


class AddDocuments(_Request):
    """Body of `POST /knowledge-bases/{name}/documents`."""

    documents: Annotated[
        list[NewDocument], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)
    ]
    wait: bool = False
    """Answer when all of them are warm or have failed (200), not when they are stored (202)."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        seen: set[str] = set()
        for document in self.documents:
            if document.id in seen:
                raise ValueError(f"two documents have the id {document.id!r}")
            seen.add(document.id)
        return self


class WarmDocuments(_Request):
    """Body of `POST /knowledge-bases/{name}/warm`."""

    ids: Annotated[list[DocumentId], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    """None: all documents of the base."""
    wait: bool = False


class DocumentCounts(BaseModel):
    """Number of documents by status."""

    warm: int = 0
    stored: int = 0
    cold: int = 0
    warming: int = 0
    failed: int = 0


class KnowledgeBaseStatus(BaseModel):
    """A knowledge base, and how much of it is in GPU memory."""

    name: str
    extra_key: str
    preamble: str | None
    context: Context
    metadata: dict[str, Any]
    created_at: datetime
    documents: DocumentCounts
    tokens: int
    """Of all documents, without preambles."""
    blocks: int
    """KV blocks that its warm documents hold; what two documents share counts once."""
    hits: int


class Document(BaseModel):
    """A document, and whether its KV is in GPU memory."""

    id: str
    base: str
    status: Status
    tokens: int
    blocks: int
    """KV blocks it holds if it is warm, and will take if it is not."""
    hits: int
    """Requests that reused it, over all restarts."""
    references: int
    """Who holds it now: documents with the same text in the same namespace (itself included), and
    running requests. 0 unless it is warm."""
    engines: list[int] = []
    """Those on which it is warm, by number (`--data-parallel-size`); `status` is `warm` if all."""
    tier: Tier | None = None
    """Where its KV is; None: nowhere."""
    last_used: datetime | None
    error: str | None
    metadata: dict[str, Any]
    keep: float | None = None
    scorer: Scorer | None = None
    """Both None: it is not compressed."""


class DocumentText(BaseModel):
    """What is computed of a document: requests reuse it where they contain these tokens."""

    id: str
    base: str
    text: str | None
    """None: the engine has no tokenizer."""
    is_exact: bool
    """Whether the tokenizer makes these tokens of the text again, as it does of nearly all that was
    added as text; where not, send the tokens."""
    token_ids: list[int]


class BlockCounts(BaseModel):
    """KV blocks of an engine; of several, of the one that has the least room.

    Attributes:
        total: all blocks of vLLM's pool.
        frozen: held by warm documents.
        promised: all documents together take as many when all are warm.
        limit: most that documents may be promised, in GPU memory or in the second tier.
        free: neither frozen nor held by a request. Those may hold cached KV all the same.
        block_size: tokens per block.
    """

    total: int
    frozen: int
    promised: int
    limit: int
    free: int
    block_size: int


class Stats(BaseModel):
    """All knowledge bases together."""

    blocks: BlockCounts
    engines: list[BlockCounts] = []
    bases: int
    documents: DocumentCounts
    hits: int
    given_back: int
    """Times a document was evicted under memory pressure, since the engine started."""


class HeldDocument(BaseModel):
    """A document that an engine holds as a whole."""

    tokens: int
    tier: Tier


class EngineHoldings(BaseModel):
    """What an engine holds, by `digests.document_digest`."""

    documents: dict[str, HeldDocument]


class Holdings(BaseModel):
    """What each engine of a server holds, for routers: neither ids nor text."""

    engines: list[EngineHoldings]


Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """Part of a list, in the order of names or ids.

    Attributes:
        next: pass it as `after` to get the next part; None: this was the last.
    """

    data: list[Item]
    next: str | None = None


class Documents(BaseModel):
    """The documents that a request was about, in its order."""

    data: list[Document]


class Error(BaseModel):
    """What was wrong.

    Attributes:
        type: one word for programs: `invalid_request`, `unauthorized`, `forbidden`, `not_found`,
            `method_not_allowed`, `conflict`, `too_large`, `insufficient_storage`, `unavailable`.
        message: one sentence for people.
        param: the field it is about, such as `documents.3.text`.
    """

    type: str
    message: str
    param: str | None = None


class ErrorAnswer(BaseModel):
    """Body of every answer from 400 on."""

    error: Error
