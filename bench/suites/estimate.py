# SPDX-License-Identifier: Apache-2.0
"""What `vllm-segreuse estimate` takes for a log of 1,000 requests, with all policies.

The log is that of `examples/request_log.py`, replayed through the tokenizer of `models/lab` and a
KV cache that holds a part of it. Each run is a process of its own, as a user starts it, that loads
vLLM first; before them one that does not count compiles what numba keeps on disk. `estimate_s` is
the median until the command has ended, and `estimate_cpu_s` that of the time that it computed,
which others on the machine lengthen less.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import harness
from examples import request_log

MODEL = harness.REPOSITORY / "models" / "lab"
OPTIONS = ("--extra-keys", "docs", "--num-blocks", "2000", "--json")


def run(quick: bool) -> harness.SuiteResult:
    """Time the command (`quick`: on fewer requests, twice)."""
    requests, runs = (100, 2) if quick else (1000, 5)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "requests.jsonl")
        bodies = request_log.bodies(requests)
        log.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")
        _timed(log)
        rows = [_timed(log) for _ in harness.progress(range(runs), "estimate")]
    figures = {"requests": requests, "prompt_tokens": rows[0]["prompt_tokens"]}
    figures |= {f"estimate_{key}": harness.median([row[key] for row in rows]) for key in _TIMES}
    return {"rows": rows, "summary": figures}


_TIMES = ("s", "cpu_s")


def _timed(log: Path) -> harness.Row:
    """One run of the command."""
    command = [sys.executable, "-m", "segreuse_tools", "estimate", str(log)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run(
        [*command, "--model", str(MODEL), *OPTIONS],
        cwd=harness.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    taken, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise harness.BenchError(f"the command failed: {ended.stderr.strip()[-500:]}")
    found = json.loads(ended.stdout)
    return {
        "requests": found["requests"],
        "prompt_tokens": found["prompt_tokens"],
        "policies": len(found["rows"]) - 1,
        "s": taken,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
