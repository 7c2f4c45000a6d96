# SPDX-License-Identifier: Apache-2.0
"""Which requests for the viewer's pages pass, and what the others are answered.

Authorization: Bearer TOKEN     passes
a session's cookie              passes, if no other site sent the request
POST login                      passes: it is where the token is asked for
anything else                   401: a login form for browsers, JSON for programs
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response

from segreuse_extras.viewer.pages import FOLDER, LOGIN, login_form
from segreuse_extras.viewer.sessions import COOKIE, Sessions, is_foreign

MAX_LOGIN_BYTES = 4096
"""Largest body of those who are not known yet."""

SESSION = "segreuse_session"
"""Key of the scope: the cookie of whoever sent the request; "" for a Bearer token."""


def is_viewer(scope: Mapping[str, Any]) -> bool:
    """Whether a request is for one of the viewer's pages."""
    path = _path(scope)
    return path == FOLDER or path.startswith(FOLDER + "/")


def _path(scope: Mapping[str, Any]) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


class Door:
    """Of one administrator's token.

    Args:
        sessions: of that token.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def admits(self, scope: Any) -> bool:
        """Whether a cookie lets a request pass; notes the session in its scope."""
        headers = Headers(scope=scope)
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        if is_foreign(scope["method"], headers):
            return False
        if not cookie or not self._sessions.is_alive(cookie, time.time()):
            return False
        scope[SESSION] = cookie
        return True

    def is_login(self, scope: Any) -> bool:
        """Whether somebody brings the token."""
        is_sent = scope["method"] == "POST" and _path(scope) == LOGIN
        return is_sent and not is_foreign("POST", Headers(scope=scope))

    def wants_page(self, scope: Any) -> bool:
        """Whether a browser asks, and not a program."""
        return "text/html" in Headers(scope=scope).get("accept", "")

    def form(self, scope: Any) -> Response:
        """The login form."""
        return login_form(scope.get("root_path", "") + FOLDER, 401)
