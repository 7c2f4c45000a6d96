# SPDX-License-Identifier: Apache-2.0
"""Who may see the viewer's pages: a browser cannot send a Bearer token, so it gets a cookie for it.

The cookie says when it ends, and is signed with a key that is made from the administrator's token.
All API servers of one token accept it, and none of them remembers it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets

from starlette.datastructures import Headers

COOKIE = "segreuse_viewer"
LIFETIME_S = 8 * 3600
_SALT = b"vllm-segreuse viewer"


class Sessions:
    """Of one administrator's token.

    Args:
        token: the administrator's.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode(errors="surrogateescape")  # variables need be no UTF-8

    @functools.cached_property
    def _key(self) -> bytes:
        # Slow on purpose: who has stolen a cookie must not find the token by trying.
        return hashlib.scrypt(self._token, salt=_SALT, n=2**14, r=8, p=1)

    def opens(self, token: str) -> bool:
        """Whether this is the token; takes the same time for any of its length."""
        return hmac.compare_digest(token.encode(errors="surrogatepass"), self._token)

    def begin(self, now_s: float) -> str:
        """The cookie of a new session."""
        content = f"{int(now_s) + LIFETIME_S}.{secrets.token_hex(16)}"
        return f"{content}.{self._sign('session', content)}"

    def is_alive(self, cookie: str, now_s: float) -> bool:
        """Whether a cookie is ours and has not ended."""
        content, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign("session", content).encode()):
            return False
        return now_s < int(content.partition(".")[0])

    def form_key(self, cookie: str) -> str:
        """What forms of a session carry: other sites can send forms, but do not know it."""
        return self._sign("form", cookie)

    def is_form_key(self, cookie: str, key: str) -> bool:
        """Whether a form carries what those of this session do."""
        given = key.encode(errors="surrogatepass")
        return hmac.compare_digest(given, self.form_key(cookie).encode())

    def _sign(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()


def is_foreign(method: str, headers: Headers) -> bool:
    """Whether a browser says that another site, or another port of this host, sends the request.

    Following a link to a page is not: the other site does not see the answer.
    """
    site = headers.get("sec-fetch-site")
    if site in ("same-origin", "none"):
        return False
    if site is not None:
        return not (method == "GET" and headers.get("sec-fetch-mode") == "navigate")
    origin = headers.get("origin")
    # Compared whole, and not taken apart: what is no address is foreign, too.
    here = headers.get("host", "")
    return origin not in (None, f"http://{here}", f"https://{here}")
