# SPDX-License-Identifier: Apache-2.0
"""Start a real OpenAI-compatible server, wait until it answers, and stop it whatever happens.

Use:
    with Server(model, ["--max-model-len", "8192"]) as server:
        server.client().completions.create(model=server.model_name, prompt="...")
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SEGREUSE_COMMAND = (sys.executable, "-m", "segreuse_tools", "serve")
"""`vllm-segreuse serve`, independent of the PATH; the model's directory follows."""

VLLM_COMMAND = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
"""vLLM alone. The CPU wheel's own `vllm` command does not start, the module does."""

_POLL_S = 0.1
_STOP_S = 30


def with_tokens(prompt: Sequence[int], body: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra_body` of a prompt of token ids, beside `prompt=""`: given as `prompt`, OpenAI's
    client looks at every id, which takes it some milliseconds for a thousand.

    Args:
        prompt: token ids.
        body: what else is added to the request.
    """
    return {**body, "prompt": list(prompt)}


class ServerError(RuntimeError):
    """The server did not come up, or went down; carries the end of its log."""


def cpu_environment(kv_space_gib: int = 1) -> dict[str, str]:
    """Environment in which an engine uses every core it may, offline and without telemetry.

    vLLM on CPU reserves a core per rank for its scheduler, and one more if a connector is there.
    Naming the cores gives plain and reusing engines the same ones. Threads wait in short spins:
    with OpenMP's default, any other busy process makes an engine on all cores ten times slower.
    """
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return {
        "GOMP_SPINCOUNT": "2000",  # read when torch is loaded, so too late after that
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Server:
    """One server process (and the engine processes below it) for the length of a `with` block.

    Args:
        model: directory of the model, as `bench.shapes.make_model` returns it.
        args: further command line arguments.
        env: laid over the caller's environment and `cpu_environment()`; an empty value unsets.
        command: how to start it; the model's directory and `args` are appended.
        log: file for its output; a new temporary file by default. Kept after the end.
        start_timeout_s: how long it may take until `/health` answers.

    Raises:
        ServerError: on entering, if it exits or does not answer in time.
    """

    def __init__(
        self,
        model: Path | str,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        command: Sequence[str] = SEGREUSE_COMMAND,
        log: Path | str | None = None,
        start_timeout_s: float = 300,
    ) -> None:
        self.model_name = str(model)
        self.port = free_port()
        self.log = Path(log) if log else _new_log()
        self.start_timeout_s = start_timeout_s
        self._argv = [*command, str(model), "--host", "127.0.0.1", "--port", str(self.port), *args]
        merged = os.environ | cpu_environment() | dict(env or {})
        self._env = {name: value for name, value in merged.items() if value}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Root of the server: `/health`, `/metrics`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes."""
        return f"{self.url}/v1"

    @property
    def pid(self) -> int:
        """Process id of the API server."""
        if self._process is None:
            raise ServerError("the server is not running: use it inside a `with` block")
        return self._process.pid

    def client(self, **options: Any) -> Any:
        """An `openai.OpenAI` for this server; never retries, so that an error is seen."""
        import openai

        return openai.OpenAI(
            **{"base_url": self.base_url, "api_key": "none", "max_retries": 0} | options
        )

    def log_text(self) -> str:
        """All that the server has written so far."""
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 30) -> str:
        """Last lines of it."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def read(self, path: str, timeout_s: float = 10) -> str:
        """Body of a GET on `path`, such as `/metrics`."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
            return str(response.read().decode())

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200: the engine lives."""
        try:
            self.read("/health", timeout_s=5)
        except OSError:
            return False
        return True

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
        """Start it, and wait until it is healthy; also after it was stopped.

        Raises:
            ServerError: it ended, or was not healthy in time.
        """
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C reaches the client first, which then stops the server.
                # The session stays the same, so that who ends all of it (`bench/gpu/stages.py`)
                # ends servers, too.
                process_group=0,
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self.stop()
            raise

    def interrupt(self) -> None:
        """Ctrl-C: have it end by itself, and wait for that.

        Raises:
            subprocess.TimeoutExpired: it still runs after a minute.
        """
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)
        self.stop()

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Meanwhile none of its processes runs.

        A process of vLLM that waits for work spins for some seconds before it sleeps, which takes
        a core from others on the machine.
        """
        os.killpg(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Ask the server to end, and end what is left of its process group. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        finally:  # also where a signal ends the wait
            with contextlib.suppress(ProcessLookupError):  # raised once the whole group has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise self._error(f"the server ended with exit code {process.returncode}")
            if self.is_healthy():
                return
            time.sleep(_POLL_S)
        raise self._error(f"the server did not answer within {self.start_timeout_s:.0f} s")

    def _error(self, what: str) -> ServerError:
        return ServerError(f"{what}; the end of its log {self.log}:\n{self.log_tail()}")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _new_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="segreuse-server-", suffix=".log")
    os.close(handle)
    return Path(name)
