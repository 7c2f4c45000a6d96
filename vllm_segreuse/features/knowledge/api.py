# SPDX-License-Identifier: Apache-2.0
"""Knowledge bases over HTTP, part of the administrator's application (`serve/admin.py`)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from vllm_segreuse.features.knowledge.schemas import (
    AddDocuments,
    CreateBase,
    Document,
    Documents,
    DocumentText,
    ErrorAnswer,
    Holdings,
    KnowledgeBaseStatus,
    Page,
    Stats,
    WarmDocuments,
)
from vllm_segreuse.features.knowledge.service import service_of

router = APIRouter(
    tags=["knowledge bases"],
    responses={
        503: {"model": ErrorAnswer, "description": "Not in this configuration, or not now."}
    },
)

_BASES = "/knowledge-bases"
_BASE = _BASES + "/{name}"
_DOCUMENTS = _BASE + "/documents"
_DOCUMENT = _DOCUMENTS + "/{document_id:path}"
# Beside the documents: below them, "/text" could be the end of an id.
_TEXT = _BASE + "/texts/{document_id:path}"
_WAITED = {200: {"model": Documents, "description": "`wait`: they are computed."}}
_FULL = {507: {"model": ErrorAnswer, "description": "Over the share of the KV cache."}}

Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[str | None, Query(max_length=4096)]


@router.post(
    _BASES,
    status_code=201,
    responses={200: {"model": KnowledgeBaseStatus, "description": "It was there already."}},
)
async def create_base(
    body: CreateBase, request: Request, response: Response
) -> KnowledgeBaseStatus:
    """Create a knowledge base."""
    base, is_new = await service_of(request.app.state).create_base(body)
    response.status_code = 201 if is_new else 200
    return base


@router.get(_BASES)
async def list_bases(
    request: Request, limit: Limit = 100, after: After = None
) -> Page[KnowledgeBaseStatus]:
    """List knowledge bases by name."""
    return await service_of(request.app.state).bases(after, limit)


@router.get(_BASE)
async def show_base(name: str, request: Request) -> KnowledgeBaseStatus:
    """Show a knowledge base."""
    return await service_of(request.app.state).base(name)


@router.delete(_BASE, status_code=204)
async def delete_base(name: str, request: Request) -> None:
    """Delete a knowledge base and its documents; again is no error."""
    await service_of(request.app.state).delete_base(name)


@router.post(_DOCUMENTS, status_code=202, responses=_FULL | _WAITED)
async def add_documents(
    name: str, body: AddDocuments, request: Request, response: Response
) -> Documents:
    """Add documents, all of them or none; equal ones stay, others of the same id are replaced."""
    documents = await service_of(request.app.state).add(name, body)
    response.status_code = 200 if body.wait else 202
    return Documents(data=documents)


@router.get(_DOCUMENTS)
async def list_documents(
    name: str, request: Request, limit: Limit = 100, after: After = None
) -> Page[Document]:
    """List the documents of a base by id."""
    return await service_of(request.app.state).documents(name, after, limit)


@router.get(_DOCUMENT)
async def show_document(name: str, document_id: str, request: Request) -> Document:
    """Show a document."""
    return await service_of(request.app.state).document(name, document_id)


@router.get(_TEXT)
async def show_text(name: str, document_id: str, request: Request) -> DocumentText:
    """Show the text of a document, and its tokens: what requests must contain to reuse it."""
    return await service_of(request.app.state).text(name, document_id)


@router.delete(_DOCUMENT, status_code=204)
async def delete_document(name: str, document_id: str, request: Request) -> None:
    """Delete a document; again is no error."""
    await service_of(request.app.state).delete(name, document_id)


@router.post(_BASE + "/warm", status_code=202, responses=_WAITED)
async def warm_documents(
    name: str, body: WarmDocuments, request: Request, response: Response
) -> Documents:
    """Bring documents back to GPU memory, by default all of the base."""
    documents = await service_of(request.app.state).warm(name, body)
    response.status_code = 200 if body.wait else 202
    return Documents(data=documents)


@router.get("/stats")
async def stats(request: Request) -> Stats:
    """Blocks, documents and hits of all knowledge bases together."""
    return await service_of(request.app.state).stats()


@router.get("/holdings")
async def holdings(
    request: Request, extra_key: Annotated[str | None, Query(max_length=4096)] = None
) -> Holdings:
    """Which documents each engine holds as a whole, how many tokens they have, and where their KV
    is: by digests, for routers."""
    return await service_of(request.app.state).holdings(extra_key)
