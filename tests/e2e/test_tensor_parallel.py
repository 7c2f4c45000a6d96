# SPDX-License-Identifier: Apache-2.0
"""Two ranks answer as one does, and fail as one (failure cases 27 and 28).

The two ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_tensor_parallel ANSWERS.json
"""

import sys
from pathlib import Path

import pytest

from tests.e2e.engine import NAMESPACE, Answer, engine
from tests.e2e.ranks import (
    Answers,
    Asking,
    Breaking,
    assert_all_recomputed,
    assert_as_one,
    assert_comparison_can_fail,
    assert_mended,
    needs_two_cores,
    run_script,
    write_answers,
)

MODULE = "tests.e2e.test_tensor_parallel"
BASE = NAMESPACE | {"segreuse_min_reused_tokens": 16, "segreuse_policy": "sparsex"}
WAYS = {
    "plain": None,
    "shift": BASE | {"segreuse_policy": "shift"},
    "sparse": BASE | {"segreuse_recompute_ratio": 0.3, "segreuse_dense_layers": 0},
    "focus": BASE | {"segreuse_recompute_ratio": 0.2, "segreuse_policy": "focus"},
    "hybrid": BASE | {"segreuse_recompute_ratio": 0.2, "segreuse_dense_layers": 1},
    "similar": BASE | {"segreuse_policy": "shift", "segreuse_similarity": 1},
    "everything": BASE | {"segreuse_recompute_ratio": 1.0, "segreuse_dense_layers": 0},
    "everything behind dense layers": BASE
    | {"segreuse_recompute_ratio": 1.0, "segreuse_dense_layers": 2},
}
SIMILARITY = {
    "by_default": False,
    "shingle_tokens": 3,
    "threshold": 0.2,
    "halo_tokens": 4,
    "max_boundary_drift": 0.15,
}
"""Of the prompts that are changed here and there, some segments are rejected, and some are not."""
EVERYTHING = [way for way in WAYS if way.startswith("everything")]
COMPUTING = "vllm_segreuse.model.layers.DecoderStack.run"

pytestmark = needs_two_cores("tensor parallelism")


class AskingOfRanks(Asking):
    """Similar segments are reused of prompts of which every twentieth token is another one."""

    def ask(self, way: str) -> list[Answer]:
        if way != "similar":
            return super().ask(way)
        prompts = [
            [token if at % 20 else token + 1 for at, token in enumerate(prompt)]
            for prompt in self.prompts
        ]
        return self.running.ask(*prompts, options=self.ways[way])


def tensor_parallel_engine(answers: Path) -> None:
    """Write the answers of an engine of two ranks, one core each; then break it for good."""
    with engine(
        "qwen3",
        # Of two prompts the second is carried out over steps.
        segreuse={"spread_tokens": 64, "similarity": SIMILARITY},
        dtype="float32",
        tensor_parallel_size=2,
        worker_extension_cls=f"{Breaking.__module__}.{Breaking.__name__}",
    ) as running:
        asking = AskingOfRanks(running, WAYS)
        found = asking.ask_every_way()
        for rank in (0, 1):
            found[f"broken {rank}"] = asking.ask_broken("shift", rank)
        write_answers(answers, found)
        running.llm.collective_rpc("break_on_rank", args=(1, COMPUTING))
        asking.ask("shift")


@pytest.fixture(scope="module")
def one_rank() -> Answers:
    with engine("qwen3", {"similarity": SIMILARITY}, dtype="float32") as running:
        return AskingOfRanks(running, WAYS).ask_every_way()


def test_of_similar_segments_two_ranks_reject_some(two_ranks: Answers) -> None:
    for answer in two_ranks["similar"]:
        assert min(answer.report["accepted_segments"], answer.report["rejected_segments"]) > 0
        assert answer.report["rejected_tokens"] > 0


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, str]:
    """Answers of two ranks, and all that the script wrote until its engine was broken."""
    return run_script(MODULE, tmp_path_factory.mktemp("tensor_parallel") / "answers.json")


@pytest.fixture(scope="module")
def two_ranks(script: tuple[Answers, str]) -> Answers:
    return script[0]


@pytest.mark.parametrize("way", EVERYTHING)
def test_recomputing_everything_equals_plain_on_two_ranks(way: str, two_ranks: Answers) -> None:
    assert_all_recomputed(two_ranks[way], two_ranks["plain"])


@pytest.mark.shows("tp", family="qwen3")
@pytest.mark.parametrize("way", WAYS)
def test_28_two_ranks_answer_as_one(way: str, two_ranks: Answers, one_rank: Answers) -> None:
    assert_as_one(two_ranks[way], one_rank[way])


@pytest.mark.parametrize("rank", [0, 1])
def test_27_an_error_before_the_ranks_met_computes_in_full(
    rank: int, script: tuple[Answers, str], one_rank: Answers
) -> None:
    answers, log = script
    assert_mended(answers[f"broken {rank}"], one_rank["plain"], rank, log)


def test_27_an_error_after_that_stops_the_engine_with_its_reason(
    script: tuple[Answers, str],
) -> None:
    """On the rank whose errors vLLM does not hear of; a script that hung had no log to show."""
    _, log = script
    assert "segment reuse failed between tensor-parallel ranks" in log
    assert f"on purpose, in {COMPUTING} on rank 1" in log
    assert "died unexpectedly" in log


def test_the_comparison_can_fail(one_rank: Answers) -> None:
    assert_comparison_can_fail(one_rank, ("sparse", "shift"), ("hybrid", "plain"))


if __name__ == "__main__":
    tensor_parallel_engine(Path(sys.argv[1]))
