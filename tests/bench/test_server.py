# SPDX-License-Identifier: Apache-2.0
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bench.gpu import stages
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


# Stands in for `python -m bench ttft`, with a suite that starts such a server and waits.
BENCH = f"""
import runpy, signal, sys, time, types
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored, and so do its children
from bench.server import Server
def run(quick):
    with Server("m", command=(sys.executable, "-c", {FAKE!r}), log=sys.argv[-1]) as server:
        with server.halted():
            print("server", server.pid, flush=True)
            time.sleep(600)
sys.modules["bench.suites.ttft"] = types.SimpleNamespace(run=run)
sys.argv = ["bench", "ttft", "--json", sys.argv[1]]
runpy.run_module("bench", run_name="__main__")
"""


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _left_of(pids: list[int]) -> list[int]:
    """Those that still run when they had time to end; they are killed."""
    deadline = time.monotonic() + 10
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [pid for pid in pids if _is_running(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _pids(log: Path) -> list[int]:
    """Of the server that writes there, its child."""
    return [int(log.read_text().split("child ")[1].split()[0])]


def test_it_answers_inside_the_block_and_is_gone_after(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with Server("a-model", env={"FLAG": "7"}, command=FAKE_COMMAND, log=log) as server:
        assert server.read("/metrics") == "/metrics"
        assert server.base_url == f"{server.url}/v1"
        assert "model a-model flag 7" in server.log_tail()
        pids = [server.pid, int(server.log_tail().split("child ")[1].split()[0])]
        assert all(_is_running(pid) for pid in pids)
    assert _left_of(pids) == [], "a process outlived its server"


def test_it_is_stopped_when_the_block_fails() -> None:
    pids = []

    def use(server: Server) -> None:
        pids.append(server.pid)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Server("m", command=FAKE_COMMAND) as server:
        use(server)
    assert not _is_running(pids[0])
    server.stop()  # once more does no harm


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_suite_ends_its_servers(
    number: signal.Signals, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", BENCH, str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as suite:
        assert suite.stdout is not None
        pids = [int(suite.stdout.readline().split()[1]), *_pids(log)]
        suite.send_signal(number)
        ended = suite.wait(60)
    assert (_left_of(pids), ended) == ([], 128 + number)


def test_a_second_signal_does_not_leave_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-c", f"import signal; signal.signal(15, signal.SIG_IGN)\n{FAKE}")
    server = Server("m", command=command)
    server.start()
    pids = [server.pid, *_pids(server.log)]

    def interrupted(self: object, timeout: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert _left_of(pids) == []


@pytest.mark.parametrize(
    ("suite", "ended"),
    [("time.sleep(600)", "stopped after"), ("os.kill(os.getpid(), 9)", "exit code -9")],
)
def test_a_stage_leaves_no_server(
    suite: str, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    code = f"""
        import os, sys, time
        from bench.server import Server
        server = Server("m", command=(sys.executable, "-c", {FAKE!r}), log={str(log)!r})
        server.start()
        print("server", server.pid, flush=True)
        {suite}
    """
    command = shlex.join([sys.executable, "-c", textwrap.dedent(code)])
    command = command.replace("{", "{{").replace("}", "}}")
    monkeypatch.setattr(stages, "STAGES", {"serving": (5, f"exec {command}")})
    assert stages.main(["--out", str(tmp_path), "serving"]) == 1
    said = (tmp_path / "log.txt").read_text()
    assert f"===== serving: {ended}" in said
    assert _left_of([int(said.split("server ")[1]), *_pids(log)]) == []


def test_a_signal_that_ends_the_stages_ends_what_they_run(tmp_path: Path) -> None:
    # The file itself, as it is run on a GPU machine, with a stage of ours.
    ours = "STAGES = {'long': (60, 'echo $$ > {out}/pid; sleep 60 & wait')}"
    code = Path(stages.__file__).read_text().replace("_LAST_LINES =", f"{ours}\n_LAST_LINES =")
    (tmp_path / "bench/gpu").mkdir(parents=True)
    (tmp_path / "bench/gpu/stages.py").write_text(code)
    command = [sys.executable, "bench/gpu/stages.py", "--out", str(tmp_path), "long"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        pid = tmp_path / "pid"
        while process.poll() is None and not (pid.exists() and pid.read_text().endswith("\n")):
            time.sleep(0.01)
        process.terminate()
        ended = process.wait(30)
    assert (_left_of([int(pid.read_text())]), ended) == ([], 128 + signal.SIGTERM)


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
