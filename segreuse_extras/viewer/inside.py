# SPDX-License-Identifier: Apache-2.0
"""Requests from an API server to itself, without a socket; they are checked like all others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from segreuse_extras.viewer.asking import TIMEOUT_S, Explanation, authorized, explain


class Inside(httpx.BaseTransport):
    """For a client in a thread of its own.

    Args:
        app: the application, with all of its middleware.
        loop: that it runs in.
    """

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send it, and wait for all of the answer."""
        answer = asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)
        try:
            return answer.result(TIMEOUT_S)
        except TimeoutError:
            answer.cancel()
            raise httpx.ReadTimeout(f"no answer in {TIMEOUT_S:g} s", request=request) from None

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)


async def explained(
    app: Any, body: Mapping[str, Any], api_key: str = "", reuse: bool = False
) -> Explanation:
    """What the application's engine would reuse of a request.

    Args:
        app: vLLM's application.
        body: of the request.
        api_key: that the request names; "" for none.
        reuse: see `explain`.

    Raises:
        ExplainError: as of `explain`.
    """
    headers = authorized(api_key)
    inside = Inside(app, asyncio.get_running_loop())
    with httpx.Client(transport=inside, base_url="http://this-server", headers=headers) as server:
        return await asyncio.to_thread(explain, server, body, reuse)
