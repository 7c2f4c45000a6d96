# SPDX-License-Identifier: Apache-2.0
"""A process that has imported what is slow, and tests copies of the sources in forks of itself.

`forks.Forks` starts it as a program of its own, so that nothing of the copies is loaded before a
fork. It reads lines of JSON, `{"foreign": [[module, [name, ...]], ...], "ours": [package, ...]}`
first, then `{"root": ..., "arguments": [...], "log": file, "seconds": ...}` for each run of pytest,
and answers each run with a line, `{"code": ...}`: as of `subprocess`, null if it was not done in
time, or a sentence if there is no run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import json
import math
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Iterable

MEMORY = 8 << 30
"""Of a run, in bytes. Whoever spins, hangs, or fills the memory has failed."""

OTHER_SOURCES = 99
"""Exit status of a run that has tested something else than the copy."""


def cpu_s(seconds: float) -> int:
    """Of the processor, for tests that take so long unchanged: functions are compiled anew."""
    return 180 + 3 * math.ceil(seconds)


def wall_s(seconds: float) -> int:
    """By the clock, likewise: others may want the machine, too."""
    return 300 + 6 * math.ceil(seconds)


def load(foreign: Iterable[tuple[str, list[str]]]) -> None:
    """Import what the sources import from elsewhere, and pytest's plugins.

    What does not exist here is left to those who can do without.
    """
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        with contextlib.suppress(Exception):
            plugin.load()
    for module, names in foreign:
        with contextlib.suppress(Exception):
            loaded = importlib.import_module(module)
            for name in names:
                if not hasattr(loaded, name):
                    importlib.import_module(f"{module}.{name}")


def unready(ours: Iterable[str]) -> str | None:
    """Why a fork would not do: something of ours is loaded, or a thread would be missing."""
    loaded = {name.partition(".")[0] for name in sys.modules} & set(ours)
    if loaded:
        return f"loaded before the fork: {', '.join(sorted(loaded))}"
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads before the fork: a library has started a pool"
    return None


def run(root: str, arguments: list[str], log: str, seconds: float) -> int | None:
    """Exit status of pytest in a fork, negative for a signal, or None if it is not done in time.

    Whatever a test has started and left behind ends with it.

    Args:
        seconds: that the tests take unchanged.
    """
    child = os.fork()
    if not child:
        _child(root, arguments, log, cpu_s(seconds))
    os.setpgid(child, child)  # in both: whoever comes first
    ended = os.pidfd_open(child)
    try:
        done = bool(select.select([ended], [], [], wall_s(seconds))[0])
    finally:  # the end of this process, too
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if done else None


def _child(root: str, arguments: list[str], log: str, limit_s: int) -> None:
    code = 3
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 9))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(root)
        sys.path.insert(0, root)
        os.environ["PYTHONPATH"] = root
        import pytest

        code = int(pytest.main(arguments))
        package = sys.modules.get("vllm_segreuse")
        if package is not None and not package.__path__[0].startswith(f"{root}/"):
            code = OTHER_SOURCES
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Load, and serve runs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries say while they are imported
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    orders = map(json.loads, sys.stdin)
    first = next(orders)
    load(first["foreign"])
    gc.collect()
    gc.freeze()  # or every collection would copy all of it
    for order in orders:
        code = unready(first["ours"]) or run(**order)
        print(json.dumps({"code": code}), file=answers, flush=True)


if __name__ == "__main__":
    main()
