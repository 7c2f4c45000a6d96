# SPDX-License-Identifier: Apache-2.0
"""The real HTTP server as a test fixture.

    with Server(make_model("llama"), ["--max-model-len", "2048"]) as server:
        server.post("/v1/completions", {...})

Starting it takes half a minute: share one per module.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

import bench.server
from bench.harness import CORE_BINDING
from bench.server import SEGREUSE_COMMAND, VLLM_COMMAND, ServerError

SMALL = (
    *("--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "4096"),
    *("--kv-cache-memory-bytes", str(256 << 20), "--block-size", "32", "--dtype", "bfloat16"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
)
"""Flags of a small engine, before those of the test: a flag given twice counts the second time."""

EVERYTHING = ("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""Flags with which every inference route is there, and answers requests with tools."""

ADMIN_TOKEN = "an admin token of these tests"
USER = "an API key with every right"
"""Of `bound_server` (`conftest.py`)."""
BOUND_BLOCKS = 121
"""Of the same, one of which is vLLM's null block."""


class Server(bench.server.Server):
    """`vllm-segreuse serve` of a small engine, asked through httpx; the model is called `m`."""

    def __init__(
        self,
        model: str | Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        stock: bool = False,
    ) -> None:
        """
        Args:
            model: directory of the model.
            args: flags behind those of `SMALL`.
            env: variables on top of this process's environment.
            stock: start vLLM's own server, where segment reuse is off unless `args` turn it on.
        """
        flags = ["--served-model-name", "m", *SMALL, *args]
        command = VLLM_COMMAND if stock else SEGREUSE_COMMAND
        ours = {"VLLM_LOGGING_COLOR": "0"}
        if CORE_BINDING in os.environ:  # by itself a server takes every core, whoever else runs
            ours[CORE_BINDING] = os.environ[CORE_BINDING]
        super().__init__(model, flags, ours | dict(env or {}), command=command)
        self._client = httpx.Client(base_url=self.url, timeout=120)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._client.close()

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Any request."""
        return self._client.request(method, path, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        """GET `path`."""
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """POST `body` as JSON to `path`."""
        if body is not None:
            # The standard encoder: it escapes what is no UTF-8, and writes NaN.
            kwargs["content"] = json.dumps(body)
            kwargs["headers"] = {"Content-Type": "application/json"} | kwargs.get("headers", {})
        return self.request("POST", path, **kwargs)


def failed_start(
    model: str | Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> str:
    """The log of a server that has to refuse to start.

    Raises:
        AssertionError: it started.
    """
    server = Server(model, args, env)
    try:
        server.start()
    except ServerError:
        return server.log_text()
    finally:
        server.stop()
    raise AssertionError(f"the server started although it should not have:\n{server.log_tail()}")
