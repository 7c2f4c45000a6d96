# SPDX-License-Identifier: Apache-2.0
"""The real routes and the real service behind a port of this machine, on an engine without a model.

A port, since escaping in paths, dropped connections and timeouts are part of what clients meet.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.knowledge import fake_engine
from tests.knowledge.admin_app import TOKEN, admin_app

__all__ = ["TOKEN", "Served", "served"]

FAULT = "FAULT"
"""A document that holds this word cannot be computed."""


class Engine(fake_engine.FakeEngine):
    """Some documents make it fail."""

    async def compute(self, tokens: list[int], *args: Any) -> bool:
        fault = self.encode(FAULT)
        if any(tokens[at : at + len(fault)] == fault for at in range(len(tokens))):
            raise RuntimeError("a faulty document")
        return await super().compute(tokens, *args)


class Served:
    """A server that listens.

    Attributes:
        url: its root.
        engine: what computes, and holds the frozen pool.
        requests: (method, path as it was sent) of all that arrived.
        failures: statuses that the next requests are answered with, before anything else.
        app: vLLM's part of the server; routes can be added to it.
    """

    def __init__(self, limit_blocks: int) -> None:
        self.url = ""
        self.engine = Engine(limit_blocks)
        self.app = admin_app(self.engine)
        self.requests: list[tuple[str, str]] = []
        self.failures: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.app
        if scope["type"] == "http":
            self.requests.append((scope["method"], scope["raw_path"].decode()))
            if self.failures:
                app = Response("busy", self.failures.pop(0))
        await app(scope, receive, send)

    def cool(self) -> None:
        """Makes every document cold, as a reset of the prefix cache does."""
        self.engine.pool.release(list(self.engine.pool.warm()))


@contextmanager
def served(limit_blocks: int = 500_000) -> Iterator[Served]:
    """A fresh one, with room for `limit_blocks` blocks of documents."""
    with _blocks(2 * limit_blocks):
        server = Served(limit_blocks)
        config = uvicorn.Config(server, port=0, log_level="warning", lifespan="on")  # type: ignore[arg-type]
        listening = uvicorn.Server(config)
        thread = threading.Thread(target=listening.run, daemon=True)
        thread.start()
        while not listening.started:
            assert thread.is_alive(), "the server ended"
            time.sleep(0.01)
        [listener] = listening.servers
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        try:
            yield server
        finally:
            listening.should_exit = True
            thread.join(10)


@contextmanager
def _blocks(total: int) -> Iterator[None]:
    """Gives engines that many blocks."""
    before, fake_engine.NUM_BLOCKS = fake_engine.NUM_BLOCKS, total
    try:
        yield
    finally:
        fake_engine.NUM_BLOCKS = before
