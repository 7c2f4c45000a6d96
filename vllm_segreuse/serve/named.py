# SPDX-License-Identifier: Apache-2.0
"""Bodies that name compressed documents: names are looked up, and markers put in their place.

"vllm_xargs": {"segreuse_documents": ["handbook/travel.md"]}    markers are in the prompt
"documents": [{"base": "handbook", "id": "travel.md"}]          the chat template puts them there
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException

from vllm_segreuse.features.knowledge.errors import KnowledgeError
from vllm_segreuse.features.knowledge.naming import NamedDocument, marker, named
from vllm_segreuse.features.knowledge.service import KnowledgeService
from vllm_segreuse.options.parsing import DOCUMENTS, EXTRA_KEYS, RequestError, parse_documents

XARGS = "vllm_xargs"


async def name_documents(
    body: dict[str, Any], service: KnowledgeService | None, has_admin: bool = False
) -> None:
    """Look up what an admitted body names; the body then has entries instead of names.

    Args:
        service: knowledge bases; None where there are none.
        has_admin: whether the server has an administrator's routes.

    Raises:
        RequestError: the body contradicts itself.
        HTTPException: with the status that the knowledge base's own routes would answer.
    """
    named.set(())
    names = names_in(body)
    if not names:
        return
    xargs = body.get(XARGS)
    keys = (xargs or {}).get(EXTRA_KEYS)
    if keys is None:
        raise RequestError(
            DOCUMENTS, f"{DOCUMENTS}: compressed documents are found by {EXTRA_KEYS}: add them"
        )
    found = await _found(names, [keys] if isinstance(keys, str) else keys, service, has_admin)
    named.set(found)
    body[XARGS] = {**(xargs or {}), DOCUMENTS: [document.entry for document in found]}


def names_in(body: dict[str, Any]) -> tuple[str, ...]:
    """Names of the compressed documents that a body has; the texts of those for the chat template
    are then their markers.

    Raises:
        RequestError: the body contradicts itself.
    """
    xargs = body.get(XARGS)
    if xargs is not None and not isinstance(xargs, dict):
        return ()  # vLLM refuses it
    listed = parse_documents((xargs or {}).get(DOCUMENTS))
    return parse_documents([*listed, *_of_template(body)] or None)


async def _found(
    names: tuple[str, ...], keys: list[str], service: KnowledgeService | None, has_admin: bool
) -> tuple[NamedDocument, ...]:
    if service is None:
        why = (
            "they need one API server with all engines: start it with --api-server-count 1"
            if has_admin
            else "start it with an admin token"
        )
        raise HTTPException(400, f"{DOCUMENTS}: this server has no knowledge bases: {why}")
    try:
        return tuple(await service.named(names, keys))
    except KnowledgeError as error:
        raise HTTPException(error.status, str(error)) from None


def _of_template(body: dict[str, Any]) -> list[str]:
    """Names of those `documents` that have a base; each gets its marker as text."""
    documents = body.get("documents")
    if not isinstance(documents, list):
        return []
    names, shown = [], []
    for i, document in enumerate(documents):
        if not isinstance(document, dict) or not {"base", "id"} <= document.keys():
            shown.append(document)
            continue
        if "text" in document:
            raise RequestError(
                DOCUMENTS,
                f"documents[{i}] has a base and a text: a compressed document is named by base and "
                "id only; drop one of them",
            )
        base, document_id = document["base"], document["id"]
        if not (isinstance(base, str) and isinstance(document_id, str)):
            raise RequestError(DOCUMENTS, f"documents[{i}]: base and id must be strings")
        names.append(f"{base}/{document_id}")
        shown.append({**document, "text": marker(names[-1])})
    if names:
        body["documents"] = shown
    return names
