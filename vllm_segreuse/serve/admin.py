# SPDX-License-Identifier: Apache-2.0
"""The administrator's application below `/plugins/segreuse/v1`: token, limits, errors.

It is an application of its own, mounted into vLLM's: every path below the prefix wants the token,
unknown ones and the OpenAPI description included, and every error has one form
(`schemas.ErrorAnswer`). Features may take paths out (`front.py`). vLLM's `--api-key` guards other
paths only, and is handed to every client.
"""

from __future__ import annotations

import hmac
import os
import re
import string
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Mount
from starlette.types import Message, Receive, Scope, Send
from vllm.logger import init_logger

import vllm_segreuse
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.features import having
from vllm_segreuse.features.bodies import TOO_DEEP
from vllm_segreuse.features.knowledge.errors import KnowledgeError
from vllm_segreuse.features.knowledge.schemas import PREFIX, Error, ErrorAnswer
from vllm_segreuse.serve import routes
from vllm_segreuse.serve.front import fronts

ADMIN_TOKEN_ENV = "VLLM_SEGREUSE_ADMIN_TOKEN"

MOST_DROPPED = 1 << 30
"""Bytes of a body that is refused, before the connection is closed all the same."""

logger = init_logger("vllm.segreuse")

_TYPES = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    422: "invalid_request",
}
_BODY = "the body must be a JSON object in UTF-8, sent with Content-Type: application/json"


def mount(app: FastAPI) -> FastAPI | None:
    """Mounts the administrator's application on vLLM's, if the environment holds a token.

    Returns:
        The application, whose `state` has to be given `engine_client`, `max_body_bytes`, the
        `service` of knowledge bases, and vLLM's application as `server`; None without a token:
        then none of its paths exists.
    """
    token = os.environ.get(ADMIN_TOKEN_ENV, "").strip(string.whitespace)  # as headers' values are
    if not token:
        logger.info("%s is not set: no administrator's routes", ADMIN_TOKEN_ENV)
        return None
    admin = make_app()
    app.router.routes.extend(mounted(admin, token))
    return admin


def mounted(admin: FastAPI, token: str) -> list[BaseRoute]:
    """The routes of vLLM's application that lead to the administrator's, and to what features add.

    Args:
        admin: the application (`make_app`).
        token: the administrator's.
    """
    of_features = [route for front in fronts() for route in front.routes(admin, token)]
    return [*of_features, Below(Gate(admin, token))]


def make_app() -> FastAPI:
    """The application without its gate."""
    admin = FastAPI(
        title="vllm-segreuse",
        version=vllm_segreuse.__version__,
        description="Kill switch and knowledge bases. Every path wants the administrator's token.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorAnswer, "description": "The request is refused."}},
    )
    admin.state.max_body_bytes = SegReuseConfig().knowledge_body_bytes
    admin.include_router(routes.router)
    for module in having("api"):
        admin.include_router(module.router)
    admin.add_exception_handler(HTTPException, _http_error)
    admin.add_exception_handler(RecursionError, _recursion_error)
    admin.add_exception_handler(RequestValidationError, _validation_error)
    admin.add_exception_handler(KnowledgeError, _knowledge_error)
    return admin


class Below(Mount):
    """All paths below the prefix; also those with line breaks, which Starlette would leave out.

    Args:
        gate: what lets requests pass to the application there.
    """

    path_regex: re.Pattern[str]

    def __init__(self, gate: Gate) -> None:
        super().__init__(PREFIX, app=gate)
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)


class Gate:
    """Lets requests with the token pass, and of their bodies no more than the limit.

    Args:
        app: the application behind it; `state.max_body_bytes` is the limit of one request.
        token: compared in constant time.
    """

    def __init__(self, app: FastAPI, token: str) -> None:
        self._app = app
        self._token = token.encode(errors="surrogateescape")  # variables need be no UTF-8

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none here: the handshake is refused with 403
            await send({"type": "websocket.close", "code": 1008})
            return
        limit, refusal = self.limit(scope), self.refusal(scope)
        body = await _read(receive, limit if refusal is None else 0)
        if refusal is not None or body is None:
            text = f"this server takes bodies of up to {limit} bytes: send less at once"
            await (refusal or answer(413, text))(scope, receive, send)
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def limit(self, scope: Scope) -> int:
        """Largest body of a request, in bytes."""
        return int(self._app.state.max_body_bytes)

    def refusal(self, scope: Scope) -> Response | None:
        """What a request is answered that may not pass; None: it may."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not given.strip():
            return self.without_token(scope)
        if not hmac.compare_digest(given.strip(), self._token):
            return answer(403, "this is not the admin token")
        return None

    def without_token(self, scope: Scope) -> Response | None:
        """What a request is answered that brings no token; None: it passes."""
        return answer(
            401,
            "this route needs the admin token: Authorization: Bearer ...",
            {"WWW-Authenticate": "Bearer"},
        )


async def _read(receive: Receive, max_bytes: int) -> bytes | None:
    """The whole body; None if it is too large, or the client has gone.

    Of one that is too large the rest is read and dropped: most clients read no answer before all is
    sent, and those that want it closed then would find the connection broken.
    """
    body, left = bytearray(), max_bytes
    while True:
        message = await receive()
        part = message.get("body", b"")
        left -= len(part)
        if left >= 0:
            body += part
        if message["type"] == "http.disconnect" or left < -MOST_DROPPED:
            return None
        if not message.get("more_body", False):
            return bytes(body) if left >= 0 else None


def answer(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    *,
    param: str | None = None,
    kind: str | None = None,
) -> JSONResponse:
    """An error in the form that all have."""
    error = Error(type=kind or _TYPES.get(status, "error"), message=message, param=param)
    body = ErrorAnswer(error=error).model_dump()
    return JSONResponse(body, status_code=status, headers=headers)


async def _http_error(request: Request, error: Any) -> Response:
    why = error.__cause__  # of a body that cannot be read, which FastAPI does not tell
    told = TOO_DEEP if isinstance(why, RecursionError) else f"{_BODY}: {why}"
    return answer(error.status_code, str(error.detail) if why is None else told, error.headers)


async def _recursion_error(request: Request, error: Any) -> JSONResponse:
    return answer(400, TOO_DEEP)


async def _validation_error(request: Request, error: Any) -> Response:
    sentence, param = first_fault(error)
    return answer(400, sentence, param=param)


def first_fault(error: RequestValidationError) -> tuple[str, str | None]:
    """(sentence, field) of the first field that does not fit, without its value: it may be
    large."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"{_BODY}: {first['ctx']['error']} at character {first['loc'][-1]}", None
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if not where and first["type"] in ("missing", "model_attributes_type"):
        return _BODY, None
    message = str(first["msg"]).removeprefix("Value error, ")
    param = ".".join(where) or None
    return (f"{param}: {message}" if param else message), param


async def _knowledge_error(request: Request, error: Any) -> Response:
    return answer(error.status, str(error), param=error.param, kind=error.type)
