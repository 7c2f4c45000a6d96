# SPDX-License-Identifier: Apache-2.0
"""The viewer's application: an own one, mounted before the administrator's and sharing its state.

Its pages take a session's cookie in place of the token, and its errors are pages.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from segreuse_extras.viewer import recent, routes
from segreuse_extras.viewer.door import MAX_LOGIN_BYTES, Door, is_viewer
from segreuse_extras.viewer.recent import Recent
from segreuse_extras.viewer.sessions import Sessions
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.features.bodies import TOO_DEEP
from vllm_segreuse.features.knowledge.errors import KnowledgeError
from vllm_segreuse.serve.admin import Below, Gate, answer, first_fault
from vllm_segreuse.serve.front import Front


class Viewer(Front):
    """Pages, and the requests that they show."""

    def routes(self, admin: FastAPI, token: str) -> Sequence[BaseRoute]:
        """All paths of the pages."""
        admin.state.recent = Recent(SegReuseConfig().viewer_requests)
        admin.state.sessions = Sessions(token)
        return [_Pages(_PagesGate(_application(admin), token))]

    @contextmanager
    def serving(self, admin: FastAPI, config: SegReuseConfig) -> Iterator[None]:
        """Remembers requests."""
        admin.state.recent = Recent(config.viewer_requests, config.viewer_text)
        with recent.watching(admin.state.recent):
            yield

    def watched(
        self, request_id: str, params: Any, outputs: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """The same outputs; remembered, if the request has extra keys."""
        return recent.watched(request_id, params, outputs)


FRONT = Viewer()


def _application(admin: FastAPI) -> FastAPI:
    pages = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    pages.state = admin.state
    pages.include_router(routes.router)
    pages.add_exception_handler(HTTPException, _http_error)
    pages.add_exception_handler(RecursionError, _recursion_error)
    pages.add_exception_handler(RequestValidationError, _validation_error)
    pages.add_exception_handler(KnowledgeError, _knowledge_error)
    return pages


class _Pages(Below):
    """The paths of the pages among those below the prefix."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (match, child) if is_viewer({**scope, **child}) else (Match.NONE, {})


class _PagesGate(Gate):
    """Also lets those pass who have a session, or ask for one."""

    def __init__(self, app: FastAPI, token: str) -> None:
        super().__init__(app, token)
        self._door = Door(app.state.sessions)

    def limit(self, scope: Scope) -> int:
        return MAX_LOGIN_BYTES if self._door.is_login(scope) else super().limit(scope)

    def refusal(self, scope: Scope) -> Response | None:
        return None if self._door.is_login(scope) else super().refusal(scope)

    def without_token(self, scope: Scope) -> Response | None:
        if self._door.admits(scope):
            return None
        is_browser = self._door.wants_page(scope)
        return self._door.form(scope) if is_browser else super().without_token(scope)


async def _http_error(request: Request, error: Any) -> Response:
    return routes.error(request, error.status_code, str(error.detail))


async def _recursion_error(request: Request, error: Any) -> Response:
    return answer(400, TOO_DEEP)


async def _validation_error(request: Request, error: Any) -> Response:
    return routes.error(request, 400, first_fault(error)[0])


async def _knowledge_error(request: Request, error: Any) -> Response:
    return routes.error(request, error.status, str(error))
