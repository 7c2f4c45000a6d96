# SPDX-License-Identifier: Apache-2.0
"""Two ranks, each with half of the experts, answer as one that has them all, and mend what fails.

The two ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_expert_parallel ANSWERS.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import test_tensor_parallel as tensor_parallel
from tests.e2e.engine import engine
from tests.e2e.ranks import (
    NOISE,
    Answers,
    Asking,
    assert_all_recomputed,
    assert_as_one,
    assert_comparison_can_fail,
    assert_mended,
    needs_two_cores,
    run_script,
    write_answers,
)
from tests.e2e.test_equality import assert_same

MODULE = "tests.e2e.test_expert_parallel"
SOME = ("plain", "shift", "sparse", "focus", "everything")
WAYS = {way: tensor_parallel.WAYS[way] for way in SOME}

pytestmark = [
    needs_two_cores("expert parallelism"),
    pytest.mark.slow(
        "each rank has half of the experts", instead="e2e/test_tensor_parallel e2e/test_equality"
    ),
]


def local_experts(worker: Any) -> list[int]:
    """Experts that each layer of a rank has."""
    layers = worker.get_model().modules()
    return [it.local_num_experts for it in layers if hasattr(it, "local_num_experts")]


def engine_of_two_ranks(path: Path) -> None:
    """Write the answers of an engine whose ranks have half of the experts each; then those of a
    pass that fails on one rank before they meet, and of one that reads NaN."""
    with engine(
        "qwen3_moe",
        segreuse={"spread_tokens": 64},
        dtype="float32",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        worker_extension_cls="tests.e2e.expert_maps.Experts",
    ) as running:
        asking = Asking(running, WAYS)
        found = asking.ask_every_way()
        found["broken"] = asking.ask_broken("shift", 1)
        asking.cache("sparse")
        running.llm.collective_rpc("spoil_on_rank", args=(1,))
        found["spoilt"] = asking.ask("sparse")
        write_answers(path, found)
        print("experts:", running.llm.collective_rpc(local_experts))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, str]:
    return run_script(MODULE, tmp_path_factory.mktemp("experts") / "answers.json")


@pytest.fixture(scope="module")
def two_ranks(script: tuple[Answers, str]) -> Answers:
    return script[0]


@pytest.fixture(scope="module")
def one_rank() -> Answers:
    with engine("qwen3_moe", dtype="float32") as running:
        return Asking(running, WAYS).ask_every_way()


def test_each_rank_has_half_of_the_experts(
    script: tuple[Answers, str],
) -> None:
    [said] = [line for line in script[1].splitlines() if line.startswith("experts:")]
    assert json.loads(said.removeprefix("experts:")) == [[4] * 4, [4] * 4]


def test_recomputing_everything_equals_plain(two_ranks: Answers) -> None:
    assert_all_recomputed(two_ranks["everything"], two_ranks["plain"])


@pytest.mark.shows("ep", family="qwen3_moe")
@pytest.mark.parametrize("way", WAYS)
def test_28_they_answer_as_one_that_has_all_experts(
    way: str, two_ranks: Answers, one_rank: Answers
) -> None:
    assert_as_one(two_ranks[way], one_rank[way])


def test_27_an_error_before_the_ranks_met_computes_in_full(
    script: tuple[Answers, str], one_rank: Answers
) -> None:
    answers, log = script
    assert_mended(answers["broken"], one_rank["plain"], 1, log)


def test_30_nan_that_one_ranks_experts_compute_is_found_by_both(
    script: tuple[Answers, str], one_rank: Answers
) -> None:
    """The plan of the other request comes in later steps, and is as ever."""
    answers, log = script
    spoilt, other = answers["spoilt"]
    assert_same(spoilt, one_rank["plain"][0], NOISE)
    assert_same(other, one_rank["sparse"][1], NOISE)
    assert "met NaN or infinity; computed in full" in log


def test_the_comparison_can_fail(one_rank: Answers) -> None:
    assert_comparison_can_fail(one_rank, ("sparse", "shift"))


if __name__ == "__main__":
    engine_of_two_ranks(Path(sys.argv[1]))
