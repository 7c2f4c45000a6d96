# SPDX-License-Identifier: Apache-2.0
"""Two stages of two tensor-parallel ranks each answer as one worker does.

The four ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_pipeline_ranks ANSWERS.json
"""

import sys
from pathlib import Path

import pytest

from tests.e2e.engine import engine
from tests.e2e.ranks import (
    NOISE,
    Answers,
    assert_as_one,
    needs_two_cores,
    run_script,
    write_answers,
)
from tests.e2e.test_equality import assert_same
from tests.e2e.test_pipeline_parallel import WAYS, AskingOfStages, staged_engine

MODULE = "tests.e2e.test_pipeline_ranks"
SOME = {way: WAYS[way] for way in ("plain", "shift", "sparse", "focus", "everything by focus")}
RANK = 3
"""The second of the last stage: vLLM hears of none of its errors."""

pytestmark = [
    pytest.mark.slow("four ranks on two cores", instead="e2e/test_pipeline_parallel"),
    needs_two_cores("pipeline parallelism", "for four ranks"),
]


def engine_of_ranks(answers: Path) -> None:
    """Write the answers of an engine of four ranks."""
    with staged_engine(tensor_parallel_size=2) as running:
        asking = AskingOfStages(running, SOME)
        found = asking.ask_every_way() | {"broken": asking.ask_broken("sparse", RANK)}
        running.check_idle()
        write_answers(answers, found)


@pytest.fixture(scope="module")
def alone() -> Answers:
    with engine("qwen3", dtype="float32") as running:
        return AskingOfStages(running, SOME).ask_every_way()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, str]:
    path = tmp_path_factory.mktemp("pipeline_ranks") / "answers.json"
    return run_script(MODULE, path, ranks=4)


@pytest.mark.parametrize("way", SOME)
def test_ranks_of_stages_answer_as_one_worker(
    way: str,
    script: tuple[Answers, str],
    alone: Answers,
) -> None:
    assert_as_one(script[0][way], alone[way])


def test_a_plan_that_one_rank_of_a_stage_cannot_prepare_is_computed_in_full(
    script: tuple[Answers, str], alone: Answers
) -> None:
    answers, log = script
    first, second = answers["broken"]
    assert first.report["recomputed_tokens"] == first.report["reused_tokens"] > 0
    assert_same(first, alone["plain"][0], NOISE)
    assert_same(second, alone["sparse"][1], NOISE)
    assert f"on rank {RANK}" in log


if __name__ == "__main__":
    engine_of_ranks(Path(sys.argv[1]))
