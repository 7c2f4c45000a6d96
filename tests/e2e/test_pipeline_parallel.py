# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages answer as one worker does, and serve nothing that one of them has spoilt.

The stages live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_pipeline_parallel ANSWERS.json
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.e2e.engine import NAMESPACE, Answer, Engine, engine
from tests.e2e.ranks import (
    NOISE,
    PREPARING,
    Answers,
    Asking,
    Breaking,
    Ways,
    assert_all_recomputed,
    assert_as_one,
    assert_comparison_can_fail,
    needs_two_cores,
    run_script,
    write_answers,
)
from tests.e2e.stepping import abort, finished_in_step, resident, settle, step, submit
from tests.e2e.test_equality import assert_same
from vllm_segreuse.model.kv_format import typed_pages

MODULE = "tests.e2e.test_pipeline_parallel"
BASE = NAMESPACE | {"segreuse_min_reused_tokens": 16}
SPARSEX = BASE | {"segreuse_policy": "sparsex", "segreuse_dense_layers": 0}
WAYS = {
    "plain": None,
    "shift": BASE | {"segreuse_policy": "shift"},
    "epic": BASE | {"segreuse_policy": "epic", "segreuse_recompute_ratio": 0.3},
    "sparse": SPARSEX | {"segreuse_recompute_ratio": 0.3},
    "hybrid": SPARSEX | {"segreuse_recompute_ratio": 0.2, "segreuse_dense_layers": 1},
    "cacheblend": BASE | {"segreuse_policy": "cacheblend", "segreuse_recompute_ratio": 0.3},
    "exact": BASE | {"segreuse_policy": "exact"},
    "focus": BASE | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.3},
    "focus by its own budget": BASE | {"segreuse_policy": "focus"},
    "focus too far off": BASE | {"segreuse_policy": "focus", "segreuse_max_drift": 1e-6},
    "prophet": BASE | {"segreuse_policy": "prophet", "segreuse_recompute_ratio": 0.3},
    "peaks": BASE | {"segreuse_policy": "peaks", "segreuse_recompute_ratio": 0.3},
    "everything by epic": BASE | {"segreuse_policy": "epic", "segreuse_recompute_ratio": 1.0},
    "everything": SPARSEX | {"segreuse_recompute_ratio": 1.0},
    "everything behind all layers of a stage": SPARSEX
    | {"segreuse_recompute_ratio": 1.0, "segreuse_dense_layers": 2},
    "everything by cacheblend": BASE
    | {"segreuse_policy": "cacheblend", "segreuse_recompute_ratio": 1.0},
    "everything by focus": BASE | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 1.0},
    "everything by prophet": BASE | {"segreuse_policy": "prophet", "segreuse_recompute_ratio": 1.0},
}
EVERYTHING = [way for way in WAYS if way.startswith("everything")]
BEHIND_FIRST = SPARSEX | {"segreuse_dense_layers": 3}
STAGES = (0, 1)
COMPUTING = "segreuse_extras.pipeline.backlog.StageBacklog._compute"
CHUNK = 24
"""Tokens of a plan in one step: documents take several."""

pytestmark = needs_two_cores("pipeline parallelism", "one per stage")


class AskingOfStages(Asking):
    """`exact` reuses the prompt itself, with a hole in it."""

    def __init__(self, running: Engine, ways: Ways = WAYS) -> None:
        super().__init__(running, ways, seed=37)

    def cache(self, way: str) -> None:
        if way != "exact":
            super().cache(way)
            return
        self.running.reset()
        self.running.ask(self.prompts[0], max_tokens=1)
        self.running.pool.evict_blocks({*resident(self.running, self.prompts[0])[2:5]})


def ask_every_way(running: Engine) -> Answers:
    """And plain prompts after each: without options only what has an exact name is found."""
    asking, found = AskingOfStages(running), {}
    for way in WAYS:
        asking.cache(way)
        found[way] = asking.ask(way)
        found[f"after {way}"] = asking.ask("plain")
        running.check_idle()
    return found


class Spoiling(Breaking):
    """What vLLM adds to its workers (`worker_extension_cls`)."""

    def spoil_on_stage(self, stage: int, blocks: list[int]) -> None:
        """NaN in place of the KV of some blocks, at the layers of one stage."""
        if self.rank == stage:  # type: ignore[attr-defined]
            side = get_kv_transfer_group().worker_side
            for layer in side.backlog.prefill.runner.stack.attention:
                typed_pages(layer)[blocks] = float("nan")


def spoilt(asking: Asking, stage: int) -> list[Answer]:
    """The answer where one stage holds NaN of the first document of a prompt."""
    asking.cache("shift")
    blocks = resident(asking.running, asking.documents[1])
    assert len(blocks) == 200 // 32
    asking.running.llm.collective_rpc("spoil_on_stage", args=(stage, blocks))
    return asking.running.ask(asking.prompts[0], options=WAYS["shift"])


def aborted(asking: Asking, steps: int) -> list[Answer]:
    """A request ends while its plan is under way; the other answers all the same."""
    asking.cache("everything")
    running = asking.running
    name = submit(running, "ends", asking.prompts[0], WAYS["everything"])
    submit(running, "stays", asking.prompts[1], WAYS["everything"])
    for _ in range(steps):
        step(running)
    assert running.scheduler.requests[name].status.name == "WAITING_FOR_REMOTE_KVS"
    abort(running, name)
    answers: dict[str, Answer] = {}
    while running.llm.llm_engine.has_unfinished_requests():
        answers |= finished_in_step(running)
    settle(running)  # its blocks are held until both stages have dropped the plan
    running.check_idle()
    return [answers["stays"]]


def staged_engine(**arguments: Any) -> Any:
    """An engine of two stages, whose plans take several steps."""
    return engine(
        "qwen3",
        segreuse={"policy": "epic", "spread_tokens": CHUNK},
        dtype="float32",
        pipeline_parallel_size=2,
        worker_cls="tests.e2e.stand_ins.pipeline_worker.PipelineWorker",
        worker_extension_cls=f"{MODULE}.{Spoiling.__name__}",
        **arguments,
    )


def pipeline_engine(answers: Path) -> None:
    """Write the answers of an engine of two stages, one core each; then break it for good."""
    with staged_engine() as running:
        found = ask_every_way(running)
        asking = AskingOfStages(running, WAYS | {"behind": BEHIND_FIRST})
        asking.cache("behind")
        found["behind"] = asking.ask("behind")
        for stage in STAGES:
            found[f"broken {stage}"] = asking.ask_broken("sparse", stage)
            found[f"spoilt {stage}"] = spoilt(asking, stage)
            running.check_idle()
        for steps in (1, 4):
            found[f"aborted {steps}"] = aborted(asking, steps)
        write_answers(answers, found)
        asking.cache("shift")
        running.llm.collective_rpc("break_on_rank", args=(1, COMPUTING))
        asking.ask("shift")


@pytest.fixture(scope="module")
def one_stage() -> Answers:
    with engine("qwen3", dtype="float32") as running:
        return ask_every_way(running)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, str]:
    """Answers of two stages, and all that the script wrote until its engine was broken."""
    return run_script(MODULE, tmp_path_factory.mktemp("pipeline_parallel") / "answers.json")


@pytest.fixture(scope="module")
def two_stages(script: tuple[Answers, str]) -> Answers:
    return script[0]


@pytest.mark.parametrize("way", EVERYTHING)
def test_recomputing_everything_equals_plain_on_one_stage(
    way: str, two_stages: Answers, one_stage: Answers
) -> None:
    assert_all_recomputed(two_stages[way], one_stage["plain"])


@pytest.mark.shows("pp", family="qwen3")
@pytest.mark.parametrize("way", WAYS)
def test_two_stages_answer_as_one(way: str, two_stages: Answers, one_stage: Answers) -> None:
    assert_as_one(two_stages[way], one_stage[way])
    if way not in ("plain", "exact"):
        assert all(answer.report["reused_tokens"] > 200 for answer in two_stages[way])


@pytest.mark.parametrize("way", WAYS)
def test_only_what_is_exact_is_found_by_its_name(
    way: str, two_stages: Answers, one_stage: Answers
) -> None:
    found = zip(two_stages[f"after {way}"], one_stage["plain"], strict=True)
    for after, plain in found:
        assert_same(after, plain, NOISE)
    cached = [answer.cached_tokens for answer in two_stages[f"after {way}"]]
    assert cached == [answer.cached_tokens for answer in one_stage[f"after {way}"]]


def test_what_chooses_behind_the_first_stage_is_not_reused(
    two_stages: Answers, one_stage: Answers
) -> None:
    for ours, plain in zip(two_stages["behind"], one_stage["plain"], strict=True):
        assert ours.report["bypass_reason"] == "chooses_behind_first_stage"
        assert_same(ours, plain, NOISE)


@pytest.mark.parametrize("stage", STAGES)
def test_nan_on_any_stage_is_computed_in_full_and_never_served(
    stage: int,
    script: tuple[Answers, str],
    one_stage: Answers,
) -> None:
    answers, log = script
    [ours] = answers[f"spoilt {stage}"]
    assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] > 400
    assert_same(ours, one_stage["plain"][0], NOISE)
    assert "segment reuse met NaN or infinity; computed in full" in log


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_that_a_stage_cannot_prepare_is_computed_in_full(
    stage: int,
    script: tuple[Answers, str],
    one_stage: Answers,
) -> None:
    answers, log = script
    first, second = answers[f"broken {stage}"]
    assert first.report["recomputed_tokens"] == first.report["reused_tokens"] > 0
    assert_same(first, one_stage["plain"][0], NOISE)
    assert second.report == one_stage["sparse"][1].report
    assert_same(second, one_stage["sparse"][1], NOISE)
    assert f"on purpose, in {PREPARING} on rank {stage}" in log


@pytest.mark.parametrize("steps", [1, 4])
def test_a_request_that_ends_meanwhile_leaves_nothing_and_disturbs_nobody(
    steps: int, two_stages: Answers, one_stage: Answers
) -> None:
    [stays] = two_stages[f"aborted {steps}"]
    assert_same(stays, one_stage["everything"][1], NOISE)


def test_an_error_between_the_stages_stops_the_engine_with_its_reason(
    script: tuple[Answers, str],
) -> None:
    _, log = script
    assert "segment reuse failed between pipeline stages" in log
    assert f"on purpose, in {COMPUTING} on rank 1" in log
    assert "died unexpectedly" in log


def test_the_comparison_can_fail(one_stage: Answers) -> None:
    assert_comparison_can_fail(one_stage, ("sparse", "shift"), ("hybrid", "plain"))


if __name__ == "__main__":
    pipeline_engine(Path(sys.argv[1]))
