# SPDX-License-Identifier: Apache-2.0
"""The routes of knowledge bases over a dictionary: the contract as clients see it, no engine.

It listens on a real port, since escaping in paths and dropped connections are part of the contract.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from vllm_segreuse.knowledge import schemas

TOKEN = "sécret"
TOKENS_PER_BLOCK = 16


class RefusalError(Exception):
    def __init__(self, status: int, type: str, message: str) -> None:
        super().__init__(message)
        self.status, self.type = status, type


class FakeServer:
    """State and behaviour; `requests` lists (method, path as sent) of everything that arrived."""

    def __init__(self) -> None:
        self.bases: dict[str, schemas.KnowledgeBase] = {}
        self.documents: dict[str, dict[str, schemas.Document]] = {}
        self.texts: dict[tuple[str, str], str | None] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[int] = []
        """Status codes that the next requests are answered with, before anything else."""
        self.max_page = 1000
        self.room_documents = 10**6
        self.url = ""

    def base(self, name: str) -> schemas.KnowledgeBase:
        if name not in self.bases:
            raise RefusalError(404, "not_found", f"there is no knowledge base {name!r}")
        base, documents = self.bases[name], self.documents[name].values()
        for status in schemas.Counts.model_fields:
            setattr(base.documents, status, sum(d.status == status for d in documents))
        base.tokens = sum(d.tokens for d in documents)
        base.blocks = sum(d.blocks for d in documents)
        return base

    def find(self, name: str, id: str) -> schemas.Document:
        self.base(name)
        if id not in self.documents[name]:
            raise RefusalError(404, "not_found", f"{name!r} has no document {id!r}")
        return self.documents[name][id]

    def tick(self, name: str) -> None:
        """One document of the base is computed; one whose text says so fails."""
        for document in self.documents[name].values():
            if document.status == "warming":
                bad = "FAIL" in (self.texts[name, document.id] or "")
                document.status = "failed" if bad else "warm"
                document.error = "too long for this model" if bad else None
                return


def _page(items: list[Any], key: str, limit: int, after: str | None) -> dict[str, Any]:
    items = [i for i in items if after is None or getattr(i, key) > after]
    rest = len(items) > limit
    return {"data": items[:limit], "next": getattr(items[limit - 1], key) if rest else None}


def make_app(fake: FakeServer) -> FastAPI:
    app = FastAPI()
    root = schemas.PREFIX + "/knowledge-bases"

    @app.middleware("http")
    async def outermost(request: Request, call_next: Any) -> Response:
        raw_path = request.scope["raw_path"].decode()
        fake.requests.append((request.method, raw_path))
        if fake.failures:
            return Response("busy", fake.failures.pop(0))
        if (
            request.headers.get("authorization", "").encode("latin-1")
            != b"Bearer " + TOKEN.encode()
        ):
            return _refused(RefusalError(403, "forbidden", "this is not the admin token"))
        return await call_next(request)

    @app.exception_handler(RefusalError)
    async def refused(request: Request, error: RefusalError) -> Response:
        return _refused(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _refused(RefusalError(400, "invalid_request", str(error.errors()[0]["msg"])))

    @app.post(root)
    async def create(body: schemas.CreateBase, response: Response) -> schemas.KnowledgeBase:
        wanted = body.model_dump() | {"extra_key": body.extra_key or body.name}
        if body.name in fake.bases:
            present = fake.bases[body.name].model_dump()
            if any(present[field] != value for field, value in wanted.items()):
                raise RefusalError(409, "conflict", f"{body.name!r} exists and is different")
            return fake.base(body.name)
        fake.bases[body.name] = schemas.KnowledgeBase(
            **wanted,
            created_at=datetime.now(UTC),
            documents=schemas.Counts(),
            tokens=0,
            blocks=0,
            hits=0,
        )
        fake.documents[body.name] = {}
        response.status_code = 201
        return fake.base(body.name)

    @app.get(root)
    async def bases(limit: int = 100, after: str | None = None) -> dict[str, Any]:
        rows = [fake.base(name) for name in sorted(fake.bases)]
        return _page(rows, "name", min(limit, fake.max_page), after)

    @app.get(root + "/{name}")
    async def base(name: str) -> schemas.KnowledgeBase:
        state = fake.base(name).model_copy(deep=True)
        fake.tick(name)
        return state

    @app.delete(root + "/{name}", status_code=204)
    async def delete(name: str) -> None:
        fake.base(name)
        del fake.bases[name], fake.documents[name]

    @app.post(root + "/{name}/documents", status_code=202)
    async def add(name: str, body: schemas.AddDocuments) -> schemas.Documents:
        fake.base(name)
        if len(fake.documents[name]) + len(body.documents) > fake.room_documents:
            raise RefusalError(507, "insufficient_storage", "there is room for 0 more blocks")
        added = []
        for new in body.documents:
            tokens = len(new.token_ids or (new.text or "").split())
            if (name, new.id) not in fake.texts or fake.texts[name, new.id] != new.text:
                fake.texts[name, new.id] = new.text
                fake.documents[name][new.id] = schemas.Document(
                    id=new.id,
                    base=name,
                    status="warming",
                    tokens=tokens,
                    blocks=tokens // TOKENS_PER_BLOCK,
                    hits=0,
                    references=0,
                    last_used=None,
                    error=None,
                    metadata=new.metadata,
                )
            added.append(fake.documents[name][new.id])
        while body.wait and any(d.status == "warming" for d in added):
            fake.tick(name)
        return schemas.Documents(data=added)

    @app.get(root + "/{name}/documents")
    async def documents(name: str, limit: int = 100, after: str | None = None) -> dict[str, Any]:
        fake.base(name)
        rows = [fake.documents[name][id] for id in sorted(fake.documents[name])]
        return _page(rows, "id", min(limit, fake.max_page), after)

    @app.get(root + "/{name}/documents/{id:path}")
    async def document(name: str, id: str) -> schemas.Document:
        return fake.find(name, id)

    @app.delete(root + "/{name}/documents/{id:path}", status_code=204)
    async def remove(name: str, id: str) -> None:
        fake.find(name, id)
        del fake.documents[name][id], fake.texts[name, id]

    @app.post(root + "/{name}/warm", status_code=202)
    async def warm(name: str, body: schemas.WarmDocuments) -> schemas.Documents:
        fake.base(name)
        ids = sorted(fake.documents[name]) if body.ids is None else body.ids
        found = [fake.find(name, id) for id in ids]
        for entry in found:
            if entry.status != "warm":
                entry.status = "warming"
        return schemas.Documents(data=found)

    @app.get(schemas.PREFIX + "/stats")
    async def stats() -> schemas.Stats:
        totals = schemas.Counts()
        for name in fake.bases:
            for status, count in fake.base(name).documents:
                setattr(totals, status, getattr(totals, status) + count)
        blocks = schemas.BlockCounts(
            total=1000, frozen=250, promised=250, limit=500, free=700, block_size=TOKENS_PER_BLOCK
        )
        return schemas.Stats(
            blocks=blocks, bases=len(fake.bases), documents=totals, hits=7, given_back=2
        )

    return app


def _refused(error: RefusalError) -> JSONResponse:
    body = schemas.ErrorAnswer(error=schemas.Error(type=error.type, message=str(error)))
    return JSONResponse(body.model_dump(), error.status)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """`app` behind a port of this machine; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended"
        time.sleep(0.01)
    [listener] = server.servers
    yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """A fresh one, listening."""
    fake = FakeServer()
    with serving(make_app(fake)) as fake.url:
        yield fake
