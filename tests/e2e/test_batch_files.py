# SPDX-License-Identifier: Apache-2.0
"""vLLM's batch runner, a process of its own: a file's bodies mean what they mean to a server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.shapes import make_model, passages
from tests.e2e.server import SMALL

pytestmark = [
    pytest.mark.slow(
        "the same bodies, from a file", instead="e2e/test_http_api compat/test_run_batch"
    ),
    pytest.mark.patches("run_batch"),
]

TEXTS = [text[:2500] for _, text in passages() if len(text) > 2500][:2]


def line(name: str, texts: list[str], **options: Any) -> str:
    messages = [{"role": "user", "content": "".join(texts)}]
    body = {"model": "m", "messages": messages, "max_tokens": 2, **options}
    url = "/v1/chat/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


@pytest.mark.parametrize("module", ["launchers", "openai"])
def test_a_file_is_answered_as_a_server_would(module: str, tmp_path: Path) -> None:
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    lines = [
        line("first", TEXTS, extra_keys="b"),
        line("turned", TEXTS[::-1], extra_keys=["b"]),
        line("misplaced", TEXTS, extra_keys="b", segreuse_policy="shift"),
        line("plain", TEXTS),
    ]
    asked.write_text("\n".join(lines))
    # One request at a time: the second finds what the first has computed.
    flags = (*SMALL, "--served-model-name", "m", "--max-num-seqs", "1", "--segreuse")
    command = [sys.executable, "-m", f"vllm.entrypoints.{module}.run_batch", *flags]
    command += ["-i", str(asked), "-o", str(answered), "--model", str(make_model("llama"))]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for row in map(json.loads, answered.read_text().splitlines()):
        response = row["response"]
        params = (response["body"] or {}).get("kv_transfer_params") or {}
        found[row["custom_id"]] = response["status_code"], params.get("segreuse")
        if row["custom_id"] == "misplaced":
            assert "segreuse_policy" in json.dumps(row["error"])
    assert {name: status for name, (status, _) in found.items()} == {
        "first": 200,
        "turned": 200,
        "misplaced": 400,
        "plain": 200,
    }
    assert found["first"][1]["reused_tokens"] == 0
    assert found["turned"][1]["reused_tokens"] > 200
    assert found["plain"][1] is None
