# SPDX-License-Identifier: Apache-2.0
"""The pages, as routes (`front.py` mounts them).

They are whole documents: links and forms work without scripts. Scripts keep a list up to date, and
let arrow keys move in a strip.
"""

from __future__ import annotations

import os
import string
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

import vllm_segreuse
from segreuse_extras.viewer.asking import EXCERPT_TOKENS, ExplainError, read_request
from segreuse_extras.viewer.door import SESSION
from segreuse_extras.viewer.figures import figures
from segreuse_extras.viewer.inside import explained
from segreuse_extras.viewer.pages import FILES, FOLDER, HEADERS, login_form, render
from segreuse_extras.viewer.recent import Recent, RecentRequest
from segreuse_extras.viewer.sessions import COOKIE, LIFETIME_S, Sessions
from segreuse_extras.viewer.strip import strip
from segreuse_extras.viewer.words import verdict
from vllm_segreuse.features.knowledge.scheduler_calls import call_scheduler
from vllm_segreuse.features.knowledge.service import service_of
from vllm_segreuse.options.server import OBSERVE

router = APIRouter(prefix=FOLDER, include_in_schema=False)

SWITCH = {"on": True, "off": False, "observe": OBSERVE}
DOCUMENTS_PER_PAGE = 100


def _base(request: Request) -> str:
    return str(request.scope.get("root_path", "")) + FOLDER


def _page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    sessions: Sessions = request.app.state.sessions
    cookie = request.scope.get(SESSION, "")
    shown = render(
        template,
        base=_base(request),
        form_key=sessions.form_key(cookie) if cookie else "",
        servers=_num_servers(request),
        pid=os.getpid(),
        **values,
    )
    # Clients choose ids of requests, and JSON may hold half of a surrogate pair.
    return HTMLResponse(shown.encode(errors="replace"), status, HEADERS)


def _to(request: Request, page: str) -> RedirectResponse:
    return RedirectResponse(f"{_base(request)}/{page}", 303, HEADERS)


def _num_servers(request: Request) -> int:
    config = getattr(request.app.state.engine_client, "vllm_config", None)
    return int(config.parallel_config._api_process_count) if config is not None else 1


async def _form(request: Request) -> dict[str, str]:
    return dict(parse_qsl((await request.body()).decode(errors="replace"), keep_blank_values=True))


async def _own_form(request: Request) -> dict[str, str]:
    """The fields of a form that a page of this session has shown.

    Raises:
        HTTPException: 403, another page has.
    """
    fields, cookie = await _form(request), request.scope.get(SESSION, "")
    sessions: Sessions = request.app.state.sessions
    if cookie and not sessions.is_form_key(cookie, fields.get("form_key", "")):
        raise HTTPException(403, "this form is not of your session: load the page again")
    return fields


@router.get("")
@router.get("/")
@router.get("/login")
async def start(request: Request) -> Response:
    """To the first page."""
    return _to(request, "requests")


@router.get("/static/{name}")
async def static(name: str) -> Response:
    """A style or script."""
    if name not in FILES:
        raise HTTPException(404, "no such file")
    content, kind = FILES[name]
    return Response(content, media_type=kind, headers=HEADERS | {"Cache-Control": "no-cache"})


@router.post("/login")
async def login(request: Request) -> Response:
    """A session for whoever brings the token."""
    sessions: Sessions = request.app.state.sessions
    token = (await _form(request)).get("token", "").strip(string.whitespace)
    if not sessions.opens(token):
        return login_form(_base(request), 403)
    answer = _to(request, "requests")
    _set_cookie(request, answer, sessions.begin(time.time()), LIFETIME_S)
    return answer


@router.post("/logout")
async def logout(request: Request) -> Response:
    """The browser forgets the session."""
    await _own_form(request)
    answer = _to(request, "requests")
    _set_cookie(request, answer, "", 0)
    return answer


def _set_cookie(request: Request, answer: Response, value: str, max_age_s: int) -> None:
    answer.set_cookie(
        COOKIE,
        value,
        max_age=max_age_s,
        path=_base(request),
        secure=request.scope["scheme"] == "https",  # `request.url` reads the header Host, too
        httponly=True,
        samesite="strict",
    )


@router.get("/requests")
async def requests(request: Request) -> Response:
    """What this API server has lately handled."""
    recent: Recent = request.app.state.recent
    return _page(request, "requests.html", seen=recent.latest(), recent=recent, when=_when)


@router.get("/requests/{number}")
async def one_request(number: int, request: Request) -> Response:
    """A request, with its strip if it was explained."""
    seen = request.app.state.recent.get(number)
    if seen is None:
        raise HTTPException(404, "this request is not remembered any more")
    shown = strip(seen.report, _texts(request, seen)) if seen.is_explained else None
    said = verdict(seen.report) if seen.report else ""
    return _page(request, "request.html", seen=seen, strip=shown, verdict=said, when=_when)


def _texts(request: Request, seen: RecentRequest) -> list[str]:
    """Beginnings of the stretches' texts, where they are kept and there is a tokenizer."""
    tokenizer = getattr(request.app.state.engine_client, "tokenizer", None)
    if seen.token_ids is None or tokenizer is None or seen.report is None:
        return []
    return [
        tokenizer.decode(
            list(seen.token_ids[each["start"] :][: min(each["tokens"], EXCERPT_TOKENS)])
        )
        for each in seen.report["explain"]
    ]


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%m-%d %H:%M:%S")


@router.get("/explain")
async def explain_form(request: Request) -> Response:
    """Where a request is pasted."""
    return _page(request, "explain.html", body="", reuse=False, error="", strip=None)


@router.post("/explain")
async def explain_request(request: Request) -> Response:
    """What would be reused of a pasted request."""
    fields = await _own_form(request)
    pasted, reuse = fields.get("body", ""), "reuse" in fields
    shown, error = None, ""
    try:
        body = read_request(pasted, "the request")
        found = await explained(request.app.state.server, body, fields.get("api_key", ""), reuse)
        shown = strip(found.report, found.texts)
    except ExplainError as failed:
        error = str(failed)
    status = 400 if error else 200
    return _page(
        request, "explain.html", status, body=pasted, reuse=reuse, error=error, strip=shown
    )


@router.get("/knowledge")
async def knowledge(request: Request, after: str | None = None) -> Response:
    """The knowledge bases."""
    service = service_of(request.app.state)
    found, stats = await service.bases(after, DOCUMENTS_PER_PAGE), await service.stats()
    return _page(request, "knowledge.html", found=found, stats=stats)


@router.get("/knowledge/{name}")
async def documents(name: str, request: Request, after: str | None = None) -> Response:
    """The documents of a knowledge base."""
    service = service_of(request.app.state)
    base, found = await service.base(name), await service.documents(name, after, DOCUMENTS_PER_PAGE)
    return _page(request, "documents.html", knowledge_base=base, found=found)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Our metrics of all API servers."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    found = figures(get_prometheus_registry().collect())
    return _page(request, "metrics.html", reuse=found.of_reuse(), audit=found.of_audit())


@router.get("/status")
async def status(request: Request) -> Response:
    """The switch, and versions."""
    import vllm

    client = request.app.state.engine_client
    found = await call_scheduler(client, "segreuse_status")
    names = {value: name for name, value in SWITCH.items()}
    return _page(
        request,
        "status.html",
        switch=names[found["enabled"]],
        indexed_blocks=found["indexed_blocks"],
        versions={"vllm-segreuse": vllm_segreuse.__version__, "vLLM": vllm.__version__},
    )


@router.post("/switch")
async def switch(request: Request) -> Response:
    """Turn reuse on or off, or observe."""
    fields = await _own_form(request)
    wanted = fields.get("to", "")
    if wanted not in SWITCH:
        raise HTTPException(400, f"to: must be one of {', '.join(SWITCH)}")
    client = request.app.state.engine_client
    await call_scheduler(client, "segreuse_set_enabled", SWITCH[wanted])
    return _to(request, "status")


def error(request: Request, status: int, message: str) -> Response:
    """What went wrong, as a page."""
    return _page(request, "error.html", status, message=message)
