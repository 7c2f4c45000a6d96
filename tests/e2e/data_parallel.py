# SPDX-License-Identifier: Apache-2.0
"""What the modules have in common that start two engines behind one address."""

import os
from typing import Any

import pytest

from bench.shapes import passages
from tests.e2e.server import ADMIN_TOKEN, Server
from tests.reports import Whole

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
ROUTES = "/plugins/segreuse/v1"
DOCUMENTS = [text[:2500] for _, text in passages() if len(text) > 2500][:2]
ENGINES = (0, 1)
FLAGS = ("--data-parallel-size", str(len(ENGINES)))
CORES = sorted(os.sched_getaffinity(0))
ENVIRONMENT = {
    "VLLM_SEGREUSE_ADMIN_TOKEN": ADMIN_TOKEN,
    "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[: len(ENGINES)])),
}
MARKS = [
    pytest.mark.slow(
        "two engines behind one address", instead="e2e/test_http_api e2e/test_knowledge"
    ),
    pytest.mark.skipif(len(CORES) < len(ENGINES), reason="needs a core for each engine"),
]


def ask(server: Server, prompt: str, engine: int, extra_keys: str = "docs") -> Any:
    """The report on a prompt that this engine answers, over a connection of its own."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "extra_keys": extra_keys}
    where = {"X-data-parallel-rank": str(engine), "Connection": "close"}
    answer = server.post("/v1/completions", body, headers=where).raise_for_status().json()
    return Whole(answer["kv_transfer_params"]["segreuse"])
