# SPDX-License-Identifier: Apache-2.0
"""Two ranks answer as one does, and fail as one (failure cases 27 and 28).

The two ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_tensor_parallel ANSWERS.json
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.test_equality import assert_same

MODULE = "tests.e2e.test_tensor_parallel"
CORES = sorted(os.sched_getaffinity(0))
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
NOISE = 2e-3  # of float32
PREPARING = "prefill.executor.token_copies"
COMPUTING = "model.layers.DecoderStack.run"

pytestmark = pytest.mark.skipif(
    len(CORES) < 2,
    reason=f"tensor parallelism needs 2 CPUs, one per rank; there is {len(CORES)}",
)


def documents_and_prompts(running: Engine) -> tuple[list[list[int]], list[list[int]]]:
    text = Prompts(running.vocab_size, seed=31)
    documents = [text.tokens(300), text.tokens(200)]
    return documents, [text.around(documents[1], documents[0]), text.around(documents[0])]


def changed(prompts: list[list[int]]) -> list[list[int]]:
    """Every twentieth token is another one."""
    return [
        [token if at % 20 else token + 1 for at, token in enumerate(prompt)] for prompt in prompts
    ]


def ask_every_way(running: Engine) -> dict[str, list[Answer]]:
    """Two prompts of the same documents, together; documents exact each time."""
    documents, prompts = documents_and_prompts(running)
    found = {}
    for way, options in WAYS.items():
        running.reset()
        if options is not None:
            running.ask(*documents, options=NAMESPACE, max_tokens=1)
        asked = changed(prompts) if way == "similar" else prompts
        found[way] = running.ask(*asked, options=options)
    return found


class Breaking:
    """What vLLM adds to its workers (`worker_extension_cls`)."""

    def break_on_rank(self, rank: int, name: str) -> None:
        """Let a function of ours raise on one rank, the first time only."""
        if self.rank == rank:  # type: ignore[attr-defined]
            patch = pytest.MonkeyPatch()

            def raising(*args: Any, **kwargs: Any) -> Any:
                patch.undo()
                raise ArithmeticError(f"on purpose, in {name} on rank {rank}")

            patch.setattr(f"vllm_segreuse.{name}", raising)


def tensor_parallel_engine(answers: Path) -> None:
    """Write the answers of an engine of two ranks, one core each; then break it for good."""
    extension = f"{MODULE}.{Breaking.__name__}"
    with engine(
        "qwen3",
        # Of two prompts the second is carried out over steps.
        segreuse={"spread_tokens": 64, "similarity": SIMILARITY},
        dtype="float32",
        tensor_parallel_size=2,
        worker_extension_cls=extension,
    ) as running:
        found = ask_every_way(running)
        documents, prompts = documents_and_prompts(running)
        for rank in (0, 1):
            running.reset()
            running.ask(*documents, options=NAMESPACE, max_tokens=1)
            running.llm.collective_rpc("break_on_rank", args=(rank, PREPARING))
            found[f"broken {rank}"] = running.ask(*prompts, options=WAYS["shift"])
        plain = {way: [dataclasses.asdict(a) for a in given] for way, given in found.items()}
        answers.write_text(json.dumps(plain))
        running.llm.collective_rpc("break_on_rank", args=(1, COMPUTING))
        running.ask(*prompts, options=WAYS["shift"])


@pytest.fixture(scope="module")
def one_rank() -> dict[str, list[Answer]]:
    with engine("qwen3", {"similarity": SIMILARITY}, dtype="float32") as running:
        return ask_every_way(running)


def test_of_similar_segments_two_ranks_reject_some(two_ranks: dict[str, list[Answer]]) -> None:
    for answer in two_ranks["similar"]:
        assert min(answer.report["accepted_segments"], answer.report["rejected_segments"]) > 0
        assert answer.report["rejected_tokens"] > 0


def run_script(module: str, path: Path, ranks: int = 2) -> tuple[dict[str, list[Answer]], str]:
    """Runs a module of tests as a script, whose ranks share two cores.

    Args:
        path: where it writes its answers.
        ranks: of its engine.

    Returns:
        These, and all that it wrote besides.
    """
    cores = "|".join(str(CORES[rank % 2]) for rank in range(ranks))
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": cores}
    done = subprocess.run(
        [sys.executable, "-m", module, str(path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    assert path.exists(), done.stdout[-6000:]
    answers = json.loads(path.read_text()).items()
    return {way: [_answer(a) for a in found] for way, found in answers}, done.stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Answer]], str]:
    """Answers of two ranks, and all that the script wrote until its engine was broken."""
    return run_script(MODULE, tmp_path_factory.mktemp("tensor_parallel") / "answers.json")


@pytest.fixture(scope="module")
def two_ranks(script: tuple[dict[str, list[Answer]], str]) -> dict[str, list[Answer]]:
    return script[0]


def _answer(fields: dict) -> Answer:
    logprobs = [{int(t): p for t, p in step.items()} for step in fields.pop("logprobs")]
    return Answer(logprobs=logprobs, **fields)


@pytest.mark.parametrize("way", EVERYTHING)
def test_recomputing_everything_equals_plain_on_two_ranks(
    way: str, two_ranks: dict[str, list[Answer]]
) -> None:
    for ours, reference in zip(two_ranks[way], two_ranks["plain"], strict=True):
        assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] >= 288
        assert_same(ours, reference, NOISE)


@pytest.mark.shows("tp", family="qwen3")
@pytest.mark.parametrize("way", WAYS)
def test_28_two_ranks_answer_as_one(
    way: str, two_ranks: dict[str, list[Answer]], one_rank: dict[str, list[Answer]]
) -> None:
    for two, one in zip(two_ranks[way], one_rank[way], strict=True):
        assert two.report == one.report
        assert_same(two, one, NOISE)


@pytest.mark.parametrize("rank", [0, 1])
def test_27_an_error_before_the_ranks_met_computes_in_full(
    rank: int, script: tuple[dict[str, list[Answer]], str], one_rank: dict[str, list[Answer]]
) -> None:
    answers, log = script
    for broken, plain in zip(answers[f"broken {rank}"], one_rank["plain"], strict=True):
        assert broken.report["reused_tokens"]
        assert_same(broken, plain, NOISE)
    assert f"on purpose, in {PREPARING} on rank {rank}" in log


def test_27_an_error_after_that_stops_the_engine_with_its_reason(
    script: tuple[dict[str, list[Answer]], str],
) -> None:
    """On the rank whose errors vLLM does not hear of; a script that hung had no log to show."""
    _, log = script
    assert "segment reuse failed between tensor-parallel ranks" in log
    assert f"on purpose, in {COMPUTING} on rank 1" in log
    assert "died unexpectedly" in log


def test_the_comparison_can_fail(one_rank: dict[str, list[Answer]]) -> None:
    """Another choice of tokens answers differently, far beyond the noise."""
    for way, other in (("sparse", "shift"), ("hybrid", "plain")):
        with pytest.raises(AssertionError, match="log-probabilities differ"):
            assert_same(one_rank[way][0], one_rank[other][0], 5 * NOISE)


if __name__ == "__main__":
    tensor_parallel_engine(Path(sys.argv[1]))
