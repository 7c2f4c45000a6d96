# SPDX-License-Identifier: Apache-2.0
import os
import sys
import time
from pathlib import Path

import pytest

from bench.server import Server, ServerError, cpu_environment

# Stands in for a server: takes the same arguments, answers every GET, and has a child of its own.
FAKE = """
import http.server, os, subprocess, sys
print("model", sys.argv[1], "flag", os.environ.get("FLAG"), flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
FAKE_COMMAND = (sys.executable, "-c", FAKE)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_it_answers_inside_the_block_and_is_gone_after(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with Server("a-model", env={"FLAG": "7"}, command=FAKE_COMMAND, log=log) as server:
        assert server.read("/metrics") == "/metrics"
        assert server.base_url == f"{server.url}/v1"
        assert "model a-model flag 7" in server.log_tail()
        pids = [server.pid, int(server.log_tail().split("child ")[1].split()[0])]
        assert all(_is_running(pid) for pid in pids)
    deadline = time.monotonic() + 10
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_is_running(pid) for pid in pids), "a process outlived its server"


def test_it_is_stopped_when_the_block_fails() -> None:
    pids = []

    def use(server: Server) -> None:
        pids.append(server.pid)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Server("m", command=FAKE_COMMAND) as server:
        use(server)
    assert not _is_running(pids[0])
    server.stop()  # once more does no harm


def test_a_server_that_ends_shows_its_log(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no such device: quantum')")
    log = tmp_path / "server.log"
    with (
        pytest.raises(ServerError, match=r"exit code 1[\s\S]*no such device: quantum") as failed,
        Server("m", command=command, log=log),
    ):
        pass
    assert str(log) in str(failed.value)


def test_a_server_that_never_answers_is_stopped() -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    server = Server("m", command=command, start_timeout_s=0.3)
    with pytest.raises(ServerError, match="did not answer within"), server:
        pass
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid


def test_an_empty_value_unsets_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAG", "from outside")
    with Server("m", env={"FLAG": ""}, command=FAKE_COMMAND) as server:
        assert "flag None" in server.log_tail()


def test_engines_are_bound_to_the_cores_they_may_use() -> None:
    cores = cpu_environment()["VLLM_CPU_OMP_THREADS_BIND"].split(",")
    assert {int(core) for core in cores} == os.sched_getaffinity(0)
