# SPDX-License-Identifier: Apache-2.0
"""Everything that is to be run on a GPU machine (docs/gpu-machine.md), with one command.

    python3 bench/gpu/stages.py --out DIR unpack+build check+tests+cuda kernels headline

A stage is a few commands in a session of their own with a limit of time; those joined by `+` run
beside one another, and what times something runs alone. A stage that fails does not stop the rest.
FlashInfer is not in the bundle, so vLLM samples without it.
What a stage said goes to DIR/log.txt as soon as it ends; results go to DIR as JSON. Needs nothing
but Python.
"""

import argparse
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = f"{sys.executable} -m pytest -p no:cacheprovider -q -rf --hypothesis-profile quick"
KERNELS = " ".join(
    f"tests/kernels/test_{name}.py"
    for name in ("triton_align", "triton_attention", "triton_scores", "flash_attention")
)
EQUALITY = f"{PYTEST} tests/e2e/test_equality.py -k bf16"
_ENGINE = ("policies", "states", "spread", "round_trips", "requests", "tier", "conversation")
ENGINE = " ".join(f"tests/e2e/test_{name}.py" for name in _ENGINE)
BENCH = f"{sys.executable} -m bench"

# The CUDA kernels alone: those for CPUs, which setup.py builds as well, take longer.
_BUILD = (
    "import runpy, subprocess; flags = runpy.run_path('setup.py')['NVCC_FLAGS']; "
    "subprocess.run(['nvcc', *flags, '-Icsrc', 'kernels/cuda/align.cu', '-o', "
    "'build/_cuda.so'], check=True); "
    "__import__('os').replace('build/_cuda.so', 'vllm_segreuse/kernels/_cuda.so')"
)
BUILD = shlex.join([sys.executable, "-c", _BUILD])

# By name: seconds, command. {out} and {into} are the folders; the environment may stand before it.
STAGES = {
    "unpack": (90, f"{sys.executable} bench/gpu/unpack.py --into {{into}} build/gpu/*.tar.xz"),
    "check": (150, f"{sys.executable} bench/gpu/unpack.py --into {{into}} --check --all"),
    "tests": (240, f"{PYTEST} -n 6 {KERNELS}"),
    # Behind the real FlashAttention 3, which the machine that wrote it had not.
    "flash": (200, f"{PYTEST} -n 4 tests/kernels/test_flash_attention.py"),
    "build": (150, BUILD),
    "cuda": (200, f"{PYTEST} -n 4 tests/kernels/test_cuda_align.py"),
    "equality": (200, EQUALITY),
    "equality-triton": (200, f"SEGREUSE_TEST_BACKEND=TRITON_ATTN {EQUALITY}"),
    "equality-v1": (200, f"VLLM_USE_V2_MODEL_RUNNER=0 {EQUALITY}"),
    # FlashAttention 3 for the common keys of every tile, however short prompts are.
    "equality-common": (200, f"SEGREUSE_TEST_COMMON_TILES=0 {EQUALITY}"),
    "spread-v1": (
        200,
        "SEGREUSE_TEST_GRAPHS=1 VLLM_USE_V2_MODEL_RUNNER=0 TRITON_F32_DEFAULT=ieee "
        f"{PYTEST} tests/e2e/test_spread.py",
    ),
    # In float32 vLLM's Triton attention would multiply in TF32, which the start-up proof refuses.
    "engine": (240, f"TRITON_F32_DEFAULT=ieee {PYTEST} -n {len(_ENGINE)} --dist loadfile {ENGINE}"),
    "tiny": (200, f"{BENCH} gpu --quick --part headline --json {{out}}/tiny.json"),
    "kernels": (150, f"{BENCH} kernels --json {{out}}/kernels.json"),
    "sizes": (150, f"{BENCH} gpu --part sizes --json {{out}}/sizes.json"),
    "headline": (420, f"{BENCH} gpu --part headline --json {{out}}/headline.json"),
    "pass": (300, f"{BENCH} gpu --part pass --json {{out}}/pass.json"),
    "serving": (
        420,
        f"{BENCH} gpu --part decode --part serve --part others --json {{out}}/serving.json",
    ),
    "decode": (300, f"{BENCH} gpu --part decode --json {{out}}/decode.json"),
    "serve": (300, f"{BENCH} gpu --part serve --json {{out}}/serve.json"),
}
_LAST_LINES = 12
_POLL_S = 0.05
_KILLED_S = 10
_writing = threading.Lock()
_starting = threading.Lock()
_sessions = set[int]()
"""Of the stages that run."""


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if every stage passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for log and results")
    parser.add_argument("--into", type=Path, default=Path("/tmp/site"), help="folder of the bundle")
    parser.add_argument("--seconds", type=float, default=1800, help="for all of it")
    parser.add_argument("stages", nargs="+", help=f"joined by + or one by one: {', '.join(STAGES)}")
    args = parser.parse_args(argv)
    groups = [[limited(name) for name in group.split("+")] for group in args.stages]
    unknown = [name for group in groups for name, _ in group if name not in STAGES]
    if unknown:
        parser.error(f"there is no stage {unknown[0]!r}; there are: {', '.join(STAGES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    failed = list[str]()
    try:
        for group in groups:
            threads = [
                threading.Thread(
                    target=stage, args=(name, min(limit, deadline), args.out, args.into, failed)
                )
                for name, limit in group
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        with _starting:
            running = list(_sessions)  # where a signal ends this process
        for session in running:
            end_session(session)
    print(f"failed: {', '.join(failed) or 'nothing'}", flush=True)
    return 1 if failed else 0


def limited(named: str) -> tuple[str, float]:
    """`NAME@SECONDS`: a stage, and when it has to have ended; without seconds, its own limit is
    all that counts."""
    name, _, seconds = named.partition("@")
    return name, time.monotonic() + float(seconds) if seconds else math.inf


def stage(name: str, deadline: float, out: Path, into: Path, failed: list[str]) -> None:
    """Run one; says how it ended, notes a failure in `failed`."""
    limit, command = STAGES[name]
    path = os.pathsep.join([str(into), str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = time.monotonic()
    remaining = min(limit, deadline - started)
    if remaining <= 0:
        failed.append(name)
        print(f"{name}: no time is left", flush=True)
        return
    with _starting:
        process = subprocess.Popen(
            ["bash", "-c", command.format(out=shlex.quote(str(out)), into=shlex.quote(str(into)))],
            cwd=ROOT,
            env={"VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that servers and engines below it end with it
        )
        _sessions.add(process.pid)
    try:
        said, _ = process.communicate(timeout=remaining)
        ended = "passed" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        end_session(process.pid)
        said, _ = process.communicate()
        ended = f"stopped after {remaining:.0f} s"
    end_session(process.pid)  # a server that a stage left would hold memory of the GPU
    _sessions.discard(process.pid)
    text = said.decode(errors="replace").strip()
    with _writing:
        if ended != "passed":
            failed.append(name)
        with (out / "log.txt").open("a") as log:
            log.write(f"===== {name}: {ended}, {time.monotonic() - started:.0f} s\n{text}\n")
        print(f"===== {name}: {ended}, {time.monotonic() - started:.0f} s", flush=True)
        print("\n".join(line[:300] for line in text.splitlines()[-_LAST_LINES:]), flush=True)


def end_session(session: int) -> None:
    """Kill all processes of a session, and wait until they are gone, for ten seconds at most.

    A server is a process group of its own, so that killing the stage's group would not reach it.
    """
    deadline = time.monotonic() + _KILLED_S
    while (running := _running_in(session)) and time.monotonic() < deadline:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _running_in(session: int) -> list[int]:
    """Processes of a session, without those that have ended (proc(5), `/proc/PID/stat`)."""
    found = list[int]()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            told = Path("/proc", pid, "stat").read_text(errors="replace")
            # Behind the name, which may have blanks: state, parent, process group, session.
            state, _, _, of = told.rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(pid))
    return found


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)
    sys.exit(main())
