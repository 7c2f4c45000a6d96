# SPDX-License-Identifier: Apache-2.0
"""The real HTTP server as a test fixture.

    with Server(make_model("llama"), ["--max-model-len", "2048"]) as server:
        server.post("/v1/completions", {...})

Starting it takes half a minute: share one per module.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

SMALL = (
    *("--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "4096"),
    *("--kv-cache-memory-bytes", str(256 << 20), "--block-size", "32", "--dtype", "bfloat16"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
)
"""Flags of a small engine, before those of the test: a flag given twice counts the second time."""

EVERYTHING = ("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""Flags with which every inference route is there, and answers requests with tools."""

STARTUP_S = 300.0
ADMIN_TOKEN = "an admin token of these tests"


class ServerError(RuntimeError):
    """The server did not start; the text holds the end of its log."""


class Server:
    """`vllm-segreuse serve` on a free port, in a process group of its own.

    Attributes:
        base_url: for example `http://127.0.0.1:18000`.
        log_path: file that both output streams of the server go to.
    """

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
            model: directory of the model; it is served under the name `m`.
            args: flags behind those of `SMALL`.
            env: variables on top of this process's environment.
            stock: start vLLM's own server, where segment reuse is off unless `args` turn it on.
        """
        self.port = _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m"),
            *((_STOCK, "--model") if stock else ("vllm_segreuse.serve.cli", "serve")),
            str(model),
            *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port)),
            *SMALL,
            *args,
        ]
        self._env = {**_QUIET, **os.environ, **(env or {})}
        descriptor, name = tempfile.mkstemp(prefix="segreuse-server-", suffix=".log")
        os.close(descriptor)
        self.log_path = Path(name)
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=self.base_url, timeout=120)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server and waits until it is healthy.

        Raises:
            ServerError: it ended, or was not healthy within `STARTUP_S`.
        """
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        deadline = time.monotonic() + STARTUP_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self.stop()
                raise ServerError(
                    f"the server ended with {self._process.returncode}:\n{self.tail()}"
                )
            if self.is_healthy():
                return
            time.sleep(0.25)
        self.stop()
        raise ServerError(f"not healthy after {STARTUP_S:.0f} s:\n{self.tail()}")

    def interrupt(self) -> None:
        """Has the server end by itself, and waits; it may be started again."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def stop(self) -> None:
        """Stops the server and every process it started."""
        self._client.close()
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # what it may have left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    @property
    def pid(self) -> int:
        """Of the API server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200: the engine lives."""
        try:
            return self._client.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        """GET `path`."""
        return self._client.get(path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """POST `body` as JSON to `path`."""
        if body is not None:
            # The standard encoder: it escapes what is no UTF-8, and writes NaN.
            kwargs["content"] = json.dumps(body)
            kwargs["headers"] = {"Content-Type": "application/json"} | kwargs.get("headers", {})
        return self._client.post(path, **kwargs)

    def log(self) -> str:
        """All that the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])


_STOCK = "vllm.entrypoints.openai.api_server"

_QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        return server.log()
    server.stop()
    raise AssertionError(f"the server started although it should not have:\n{server.tail()}")
