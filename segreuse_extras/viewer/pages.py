# SPDX-License-Identifier: Apache-2.0
"""What pages are made of: templates, files beside them, headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup
from starlette.responses import HTMLResponse

from segreuse_extras.viewer import templating

FOLDER = "/ui"
"""Path of all pages, below that of the administrator's routes."""

LOGIN = FOLDER + "/login"

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer: nothing is loaded from elsewhere, framed, or kept."""

_HERE = Path(__file__).parent
_TYPES = {".css": "text/css", ".js": "text/javascript"}

FILES = {
    file.name: (file.read_bytes(), _TYPES[file.suffix])
    for folder in (templating.STATIC, _HERE / "static")
    for file in folder.iterdir()
    if file.suffix in _TYPES
}
"""Content and type of the files that pages load, by name."""


_LOGIN_STYLE = "".join(FILES[name][0].decode() for name in ("viewer.css", "pages.css"))
_LOGIN_POLICY = POLICY.replace(
    "style-src 'self'", f"style-src '{templating.source_hash(_LOGIN_STYLE)}'"
)


def login_form(base: str, status: int) -> HTMLResponse:
    """Asks for the token, and needs no other file: all of these want a session.

    Args:
        base: path of all pages.
        status: 403: the token was wrong.
    """
    style = Markup(_LOGIN_STYLE)
    shown = render("login.html", base=base, wrong=status == 403, style=style)
    return HTMLResponse(shown, status, HEADERS | {"Content-Security-Policy": _LOGIN_POLICY})


def render(template: str, **values: Any) -> str:
    """A page; every value is escaped."""
    return templating.environment(_HERE / "templates").get_template(template).render(**values)
