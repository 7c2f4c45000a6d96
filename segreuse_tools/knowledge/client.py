# SPDX-License-Identifier: Apache-2.0
"""Client of the knowledge-base routes of a running server.

    with KnowledgeClient("http://localhost:8000", token) as client:
        client.create("handbook")
        client.add("handbook", [NewDocument(id="a", text="...")], wait=True)
        for document in client.documents("handbook"):
            print(document.id, document.status)

Neither vLLM nor torch is imported. Every route may be sent twice without harm (creating what is
there already, adding what has not changed and deleting what is gone all succeed), so that requests
whose answer was lost, or that met a server too busy, are sent again.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from segreuse_extras.viewer.asking import authorized, checked_key, root_of
from segreuse_tools.knowledge import TOKEN_ENV
from vllm_segreuse.features.knowledge.schemas import (
    MAX_DOCUMENTS,
    PREFIX,
    AddDocuments,
    BaseName,
    Context,
    CreateBase,
    Document,
    DocumentId,
    Documents,
    DocumentText,
    ErrorAnswer,
    Holdings,
    KnowledgeBaseStatus,
    NewDocument,
    Page,
    Stats,
    WarmDocuments,
)

BATCH_CHARS = 1 << 20
"""Text in one request; a longer document goes alone."""

BATCH_DOCUMENTS = 100
"""Documents in one request."""

PAGE = MAX_DOCUMENTS
"""Entries that are asked for at once when a list is read."""

PAUSES_S = (0.2, 0.6, 1.2)
"""Before each further attempt at a request."""

_BUSY = frozenset({429, 502, 503, 504})

_NAME: TypeAdapter[str] = TypeAdapter(BaseName)
_ID: TypeAdapter[str] = TypeAdapter(DocumentId)

Model = TypeVar("Model", bound=BaseModel)


class ClientError(RuntimeError):
    """A request failed; the message is for people."""


class UnreachableError(ClientError):
    """There was no answer from the server."""


class RejectedError(ClientError):
    """The server answered with an error.

    Attributes:
        status: of HTTP.
        type: one word, see `schemas.Error`; empty if the answer was not one of ours.
        param: the field it is about.
    """

    def __init__(self, message: str, status: int, type: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.type, self.param = status, type, param


class KnowledgeClient:
    """Creates, fills and watches the knowledge bases of one server.

    Args:
        url: root of the server; `/v1` at its end does no harm.
        token: the server's admin token; white space around it does not count.
        timeout_s: for one answer, except where a call waits for documents.
        transport: instead of the network, for tests.

    All methods raise `UnreachableError`, `RejectedError`, and for arguments that no server would
    take a `ValueError` (most are pydantic's `ValidationError`).
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 60,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = root_of(url)
        self._timeout = httpx.Timeout(timeout_s)
        self._http = httpx.Client(
            base_url=self.url + PREFIX,
            headers=authorized(checked_token(token)),
            timeout=self._timeout,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    # Bases.

    def create(
        self,
        name: str,
        *,
        extra_key: str | None = None,
        preamble: str | None = None,
        context: Context | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> KnowledgeBaseStatus:
        """Makes a base, or finds the same one; one that differs under this name is a 409.

        Args:
            name: of the base.
            extra_key: what requests name in `extra_keys` to reuse it; by default its name.
            preamble: text before every document while it is computed.
            context: `siblings`: documents are computed behind the beginnings of two others of the
                base; `none`: alone; None: `siblings`, or as the base is that exists.
            metadata: anything that is JSON.
        """
        body = CreateBase(
            name=name,
            extra_key=extra_key,
            preamble=preamble,
            context=context,
            metadata=dict(metadata or {}),
        )
        return self._send(KnowledgeBaseStatus, "POST", "/knowledge-bases", body)

    def bases(self) -> Iterator[KnowledgeBaseStatus]:
        """All bases, in the order of their names."""
        return self._pages(Page[KnowledgeBaseStatus], "/knowledge-bases")

    def base(self, name: str) -> KnowledgeBaseStatus:
        """One base."""
        return self._send(KnowledgeBaseStatus, "GET", _base(name))

    def delete(self, name: str) -> None:
        """Removes a base with all its documents."""
        self._request("DELETE", _base(name))

    # Documents.

    def add(
        self, name: str, documents: Iterable[NewDocument], *, wait: bool = False
    ) -> list[Document]:
        """Adds or replaces documents, by their ids; unchanged ones are left as they are.

        Sent in batches, each of which the server takes whole or not at all.

        Args:
            name: of the base.
            documents: any number.
            wait: return when all of them are warm or have failed, not when they are stored.
        """
        added: list[Document] = []
        for batch in batches(documents):
            body = AddDocuments(documents=batch, wait=wait)
            path = f"{_base(name)}/documents"
            added += self._send(Documents, "POST", path, body, waits=wait).data
        return added

    def documents(self, name: str) -> Iterator[Document]:
        """All documents of a base, in the order of their ids."""
        return self._pages(Page[Document], f"{_base(name)}/documents")

    def document(self, name: str, document_id: str) -> Document:
        """One document."""
        return self._send(Document, "GET", _document(name, document_id))

    def text(self, name: str, document_id: str) -> DocumentText:
        """What was made of a document: requests that contain it reuse it."""
        return self._send(DocumentText, "GET", _document(name, document_id, "texts"))

    def remove(self, name: str, document_id: str) -> None:
        """Removes one document."""
        self._request("DELETE", _document(name, document_id))

    def warm(
        self, name: str, ids: Sequence[str] | None = None, *, wait: bool = False
    ) -> list[Document]:
        """Computes again what is cold.

        Args:
            name: of the base.
            ids: the documents; by default all.
            wait: return when they are warm or have failed.
        """
        parts: list[list[str] | None] = [None]
        if ids is not None:
            parts = [list(ids[at : at + MAX_DOCUMENTS]) for at in range(0, len(ids), MAX_DOCUMENTS)]
        warmed: list[Document] = []
        for part in parts:
            body = WarmDocuments(ids=part, wait=wait)
            warmed += self._send(Documents, "POST", f"{_base(name)}/warm", body, waits=wait).data
        return warmed

    def watch(self, name: str, interval_s: float = 0.5) -> Iterator[KnowledgeBaseStatus]:
        """The base again and again, until none of its documents is warming."""
        while True:
            base = self.base(name)
            yield base
            if not base.documents.warming:
                return
            time.sleep(interval_s)

    def stats(self) -> Stats:
        """Blocks, documents and hits of all bases together."""
        return self._send(Stats, "GET", "/stats")

    def holdings(self) -> Holdings:
        """What each engine holds of them, by digests."""
        return self._send(Holdings, "GET", "/holdings")

    # HTTP.

    def _pages(self, page: type[Page[Model]], path: str) -> Iterator[Model]:
        after: str | None = None
        while True:
            query: dict[str, str | int] = {"limit": PAGE}
            if after is not None:
                query["after"] = after
            part = self._send(page, "GET", path, query=query)
            yield from part.data
            if part.next is None:
                return
            after = part.next

    def _send(
        self,
        answer: type[Model],
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        query: Mapping[str, str | int] | None = None,
        waits: bool = False,
    ) -> Model:
        response = self._request(method, path, body, query=query, waits=waits)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise RejectedError(
                f"{self.url} answered {method} {path} with something else than expected: is it "
                f"a vllm-segreuse server of this version? ({error.errors()[0]['msg']})",
                response.status_code,
            ) from error

    def _request(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        query: Mapping[str, str | int] | None = None,
        waits: bool = False,
    ) -> httpx.Response:
        request = self._http.build_request(
            method,
            path,
            params=query,
            content=body.model_dump_json(exclude_none=True) if body is not None else None,
            headers={"Content-Type": "application/json"} if body is not None else None,
            timeout=httpx.Timeout(self._timeout.connect, read=None) if waits else self._timeout,
        )
        response = self._attempt(request)
        if response.is_success:
            return response
        raise self._refusal(response)

    def _attempt(self, request: httpx.Request) -> httpx.Response:
        for pause_s in (*PAUSES_S, None):
            try:
                response = self._http.send(request)
            except httpx.ReadTimeout as error:
                # The server is at it; a second request would only add to its work.
                raise UnreachableError(f"{self.url} did not answer in time") from error
            except httpx.LocalProtocolError as error:
                # Nothing was sent, nor would it be the next time.
                raise ClientError(f"the request cannot be sent: {error}") from error
            except httpx.TransportError as error:
                if pause_s is None:
                    raise UnreachableError(f"{self.url} cannot be reached: {error}") from error
            else:
                if response.status_code not in _BUSY or pause_s is None:
                    return response
            time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _refusal(self, response: httpx.Response) -> RejectedError:
        status = response.status_code
        try:
            error = ErrorAnswer.model_validate_json(response.content).error
        except ValidationError:
            if status == HTTPStatus.NOT_FOUND:
                message = (
                    f"{self.url} has no knowledge bases: is it vllm-segreuse, started with an "
                    "admin token?"
                )
            else:
                message = f"{self.url} answered {status} {response.reason_phrase}"
            return RejectedError(message, status)
        return RejectedError(error.message, status, error.type, error.param)


def checked_token(token: str) -> str:
    """An admin token that a header can carry, without white space around it.

    Raises:
        ValueError: it is empty, or has a character that no header may have; it is not shown.
    """
    to_do = f"pass the server's, or set {TOKEN_ENV} to it"
    token = checked_key(token, "admin token", to_do)
    if not token:
        raise ValueError(f"the admin token is empty: {to_do}")
    return token


def batches(documents: Iterable[NewDocument]) -> Iterator[list[NewDocument]]:
    """Cuts `documents` into requests of at most `BATCH_DOCUMENTS` and `BATCH_CHARS`."""
    batch: list[NewDocument] = []
    size = 0
    for document in documents:
        # A token id takes about as much room as a word.
        weight = len(document.text or "") + 6 * len(document.token_ids or ())
        if batch and (len(batch) == BATCH_DOCUMENTS or size + weight > BATCH_CHARS):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += weight
    if batch:
        yield batch


def _base(name: str) -> str:
    return f"/knowledge-bases/{quote(_NAME.validate_python(name), safe='')}"


def _document(name: str, document_id: str, part: str = "documents") -> str:
    # One segment of the path, whatever the id holds.
    return f"{_base(name)}/{part}/{quote(_ID.validate_python(document_id), safe='')}"
