# SPDX-License-Identifier: Apache-2.0
"""The recipes' load generators, as docs/recipes.md calls them, against the real server."""

import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import make_model
from examples import workload
from segreuse_tools.commands import estimate
from tests.e2e.server import Server
from tests.estimate.test_traces import ragpulse, write_ragpulse

pytestmark = pytest.mark.slow(
    "other clients send the requests", instead="e2e/test_http_api serve/test_recipes"
)

PAGE = Path(__file__).parent.parent.parent / "docs" / "recipes.md"

REQUESTS, DOCUMENTS, CHARACTERS = 12, 2, 2000


@pytest.fixture(scope="module")
def model() -> Path:
    return make_model("qwen3")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(model) as running:
        yield running


@pytest.fixture
def prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    arguments = ["--documents", str(DOCUMENTS), "--of", "4", "--characters", str(CHARACTERS)]
    workload.main(["--requests", str(REQUESTS), "--output-tokens", "4", *arguments])
    file = tmp_path / "workload.jsonl"
    file.write_text(capsys.readouterr().out)
    return file


def reused(server: Server) -> dict[str, float]:
    """Tokens so far, by kind."""
    lines = re.findall(
        r'^vllm:segreuse_tokens_total\{.*kind="(\w+)".*\} (\S+)$',
        server.get("/metrics").text,
        re.MULTILINE,
    )
    return {kind: float(value) for kind, value in lines}


def run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_most_is_reused(server: Server, before: dict[str, float]) -> None:
    """Four documents were asked for 24 times."""
    counted = {kind: value - before[kind] for kind, value in reused(server).items()}
    prompt = sum(counted[kind] for kind in ("prefix", "reused", "new"))
    assert counted["reused"] > 0.5 * prompt


def vllm_bench() -> str:
    """The page's program for `vllm bench serve`: the CPU build's `vllm` command does not start."""
    program = re.search(r"```python\n( *from vllm\.benchmarks.*?)```", PAGE.read_text(), re.DOTALL)
    assert program is not None
    return textwrap.dedent(program[1])


@pytest.mark.skipif(
    importlib.util.find_spec("pandas") is None, reason="vllm bench serve needs pandas"
)
def test_vllm_bench_serve(server: Server, model: Path, prompts: Path, tmp_path: Path) -> None:
    before = reused(server)
    result = tmp_path / "result.json"
    run(
        [
            *(sys.executable, "-c", vllm_bench(), "--base-url", server.url, "--model", "m"),
            *("--tokenizer", str(model), "--dataset-name", "custom"),
            *("--dataset-path", str(prompts), "--skip-chat-template", "--disable-shuffle"),
            *(
                "--num-prompts",
                str(REQUESTS),
                "--max-concurrency",
                "1",
                "--custom-output-len",
                "-1",
            ),
            *("--extra-body", '{"extra_keys": ["bench-serve"]}'),
            *("--save-result", "--result-filename", str(result)),
        ],
        tmp_path,
    )
    measured: dict[str, Any] = json.loads(result.read_text())
    assert (measured["completed"], measured["failed"]) == (REQUESTS, 0)
    assert measured["mean_ttft_ms"] > 0
    assert_most_is_reused(server, before)


@pytest.mark.skipif(
    importlib.util.find_spec("pandas") is None, reason="vllm bench serve needs pandas"
)
def test_vllm_bench_serve_of_a_trace(server: Server, model: Path, tmp_path: Path) -> None:
    """As many questions about the same four passages, sent ten times a second."""
    passages = [[number % 4, (number + 1) % 4, (number + 2) % 4] for number in range(REQUESTS)]
    lines = [ragpulse(number / 10, ids, number) for number, ids in enumerate(passages)]
    trace, file = write_ragpulse(tmp_path, lines, tokens=480), tmp_path / "written.jsonl"
    assert estimate.main([str(trace), "--policy", "shift", "--write", str(file)]) == 0
    before = reused(server)
    result = tmp_path / "result.json"
    run(
        [
            *(sys.executable, "-c", vllm_bench(), "--base-url", server.url, "--model", "m"),
            *("--tokenizer", str(model), "--dataset-name", "timed_trace"),
            *("--dataset-path", str(file), "--timed-trace-sec-multiplier", "0.001"),
            *("--num-prompts", str(REQUESTS), "--extra-body", '{"extra_keys": ["timed-trace"]}'),
            *("--save-result", "--result-filename", str(result)),
        ],
        tmp_path,
    )
    measured: dict[str, Any] = json.loads(result.read_text())
    assert (measured["completed"], measured["failed"]) == (REQUESTS, 0)
    counted = {kind: value - before[kind] for kind, value in reused(server).items()}
    assert counted["reused"] > 0.3 * sum(counted[kind] for kind in ("prefix", "reused", "new"))


@pytest.mark.skipif(importlib.util.find_spec("guidellm") is None, reason="guidellm is not there")
def test_guidellm(server: Server, model: Path, prompts: Path, tmp_path: Path) -> None:
    before = reused(server)
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "model": "m",
        "request_format": "/v1/completions",
        "extras": {"body": {"extra_keys": ["guidellm"]}},
    }
    data = {"kind": "json_file", "path": str(prompts), "load_kwargs": {"split": "train"}}
    run(
        [
            *(sys.executable, "-m", "guidellm", "run", "--backend", json.dumps(backend)),
            *("--data", json.dumps(data)),
            *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(model)})),
            *("--profile", "kind=synchronous"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--output", f"kind=json,path={tmp_path / 'result.json'}"),
        ],
        tmp_path,
    )
    assert_most_is_reused(server, before)
