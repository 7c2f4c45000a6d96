# SPDX-License-Identifier: Apache-2.0
"""Two ranks, each with half of the experts, answer as one that has them all, and mend what fails.

The two ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_expert_parallel ANSWERS.json
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import test_tensor_parallel as ranks
from tests.e2e.engine import NAMESPACE, Answer, Engine, engine
from tests.e2e.test_equality import assert_same

MODULE = "tests.e2e.test_expert_parallel"
WAYS = {way: ranks.WAYS[way] for way in ("plain", "shift", "sparse", "focus", "everything")}

pytestmark = pytest.mark.skipif(
    len(ranks.CORES) < 2,
    reason=f"expert parallelism needs 2 CPUs, one per rank; there is {len(ranks.CORES)}",
)


def ask_every_way(running: Engine) -> dict[str, list[Answer]]:
    """Two prompts of the same documents, together; documents exact each time."""
    documents, prompts = ranks.documents_and_prompts(running)
    found = {}
    for way, options in WAYS.items():
        running.reset()
        if options is not None:
            running.ask(*documents, options=NAMESPACE, max_tokens=1)
        found[way] = running.ask(*prompts, options=options)
    return found


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
        found = ask_every_way(running)
        documents, prompts = ranks.documents_and_prompts(running)
        running.reset()
        running.ask(*documents, options=NAMESPACE, max_tokens=1)
        running.llm.collective_rpc("break_on_rank", args=(1, ranks.PREPARING))
        found["broken"] = running.ask(*prompts, options=ranks.WAYS["shift"])
        running.reset()
        running.ask(*documents, options=NAMESPACE, max_tokens=1)
        running.llm.collective_rpc("spoil_on_rank", args=(1,))
        found["spoilt"] = running.ask(*prompts, options=ranks.WAYS["sparse"])
        plain: dict[str, Any] = {
            way: [dataclasses.asdict(answer) for answer in given] for way, given in found.items()
        }
        path.write_text(json.dumps(plain))
        print("experts:", running.llm.collective_rpc(local_experts))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Answer]], str]:
    return ranks.run_script(MODULE, tmp_path_factory.mktemp("experts") / "answers.json")


@pytest.fixture(scope="module")
def two_ranks(script: tuple[dict[str, list[Answer]], str]) -> dict[str, list[Answer]]:
    return script[0]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, list[Answer]]:
    with engine("qwen3_moe", dtype="float32") as running:
        return ask_every_way(running)


def test_each_rank_has_half_of_the_experts(
    script: tuple[dict[str, list[Answer]], str],
) -> None:
    [said] = [line for line in script[1].splitlines() if line.startswith("experts:")]
    assert json.loads(said.removeprefix("experts:")) == [[4] * 4, [4] * 4]


def test_recomputing_everything_equals_plain(two_ranks: dict[str, list[Answer]]) -> None:
    for ours, plain in zip(two_ranks["everything"], two_ranks["plain"], strict=True):
        assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] >= 288
        assert_same(ours, plain, ranks.NOISE)


@pytest.mark.shows("ep", family="qwen3_moe")
@pytest.mark.parametrize("way", WAYS)
def test_28_they_answer_as_one_that_has_all_experts(
    way: str, two_ranks: dict[str, list[Answer]], one_rank: dict[str, list[Answer]]
) -> None:
    for two, one in zip(two_ranks[way], one_rank[way], strict=True):
        assert two.report == one.report
        assert_same(two, one, ranks.NOISE)


def test_27_an_error_before_the_ranks_met_computes_in_full(
    script: tuple[dict[str, list[Answer]], str], one_rank: dict[str, list[Answer]]
) -> None:
    answers, log = script
    for broken, plain in zip(answers["broken"], one_rank["plain"], strict=True):
        assert broken.report["reused_tokens"]
        assert_same(broken, plain, ranks.NOISE)
    assert f"on purpose, in {ranks.PREPARING} on rank 1" in log


def test_30_nan_that_one_ranks_experts_compute_is_found_by_both(
    script: tuple[dict[str, list[Answer]], str], one_rank: dict[str, list[Answer]]
) -> None:
    """The plan of the other request comes in later steps, and is as ever."""
    answers, log = script
    spoilt, other = answers["spoilt"]
    assert_same(spoilt, one_rank["plain"][0], ranks.NOISE)
    assert_same(other, one_rank["sparse"][1], ranks.NOISE)
    assert "met NaN or infinity; computed in full" in log


def test_the_comparison_can_fail(one_rank: dict[str, list[Answer]]) -> None:
    """Another choice of tokens answers differently, far beyond the noise."""
    with pytest.raises(AssertionError, match="log-probabilities differ"):
        assert_same(one_rank["sparse"][0], one_rank["shift"][0], 5 * ranks.NOISE)


if __name__ == "__main__":
    engine_of_two_ranks(Path(sys.argv[1]))
