# SPDX-License-Identifier: Apache-2.0
"""Two stages of two tensor-parallel ranks each answer as one worker does.

The four ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_pipeline_ranks ANSWERS.json
"""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from tests.e2e.engine import Answer, Engine, engine
from tests.e2e.test_equality import assert_same
from tests.e2e.test_pipeline_parallel import (
    NOISE,
    WAYS,
    broken,
    cached,
    documents_and_prompts,
    staged_engine,
)
from tests.e2e.test_tensor_parallel import CORES, run_script

MODULE = "tests.e2e.test_pipeline_ranks"
SOME = ("plain", "shift", "sparse", "cacheblend", "everything")
RANK = 3
"""The second of the last stage: vLLM hears of none of its errors."""

pytestmark = [
    pytest.mark.slow("four ranks on two cores", instead="e2e/test_pipeline_parallel"),
    pytest.mark.skipif(len(CORES) < 2, reason=f"four ranks need 2 CPUs; there is {len(CORES)}"),
]


def ask(running: Engine) -> dict[str, list[Answer]]:
    documents, prompts = documents_and_prompts(running)
    found = {}
    for way in SOME:
        cached(running, way, documents, prompts[0])
        found[way] = running.ask(*prompts, options=WAYS[way])
    return found


def engine_of_ranks(answers: Path) -> None:
    """Write the answers of an engine of four ranks."""
    with staged_engine(tensor_parallel_size=2) as running:
        found = ask(running) | {"broken": broken(running, RANK)}
        running.check_idle()
        plain = {way: [dataclasses.asdict(a) for a in given] for way, given in found.items()}
        answers.write_text(json.dumps(plain))


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Answer]]:
    with engine("qwen3", dtype="float32") as running:
        return ask(running)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Answer]], str]:
    path = tmp_path_factory.mktemp("pipeline_ranks") / "answers.json"
    return run_script(MODULE, path, ranks=4)


@pytest.mark.parametrize("way", SOME)
def test_ranks_of_stages_answer_as_one_worker(
    way: str,
    script: tuple[dict[str, list[Answer]], str],
    alone: dict[str, list[Answer]],
) -> None:
    for found, one in zip(script[0][way], alone[way], strict=True):
        assert found.report == one.report
        assert_same(found, one, NOISE)


def test_a_plan_that_one_rank_of_a_stage_cannot_prepare_is_computed_in_full(
    script: tuple[dict[str, list[Answer]], str], alone: dict[str, list[Answer]]
) -> None:
    answers, log = script
    first, second = answers["broken"]
    assert first.report["recomputed_tokens"] == first.report["reused_tokens"] > 0
    assert_same(first, alone["plain"][0], NOISE)
    assert_same(second, alone["sparse"][1], NOISE)
    assert f"on rank {RANK}" in log


if __name__ == "__main__":
    engine_of_ranks(Path(sys.argv[1]))
