# SPDX-License-Identifier: Apache-2.0
"""Two ranks answer as one does, and choose the same tokens to recompute (failure cases 28).

The two ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_tensor_parallel ANSWERS.json
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.test_equality import assert_same

MODULE = "tests.e2e.test_tensor_parallel"
CORES = sorted(os.sched_getaffinity(0))
BASE = NAMESPACE | {"segreuse_min_reused_tokens": 16}
WAYS = {
    "plain": None,
    "shift": BASE | {"segreuse_policy": "shift"},
    "sparse": BASE | {"segreuse_recompute_ratio": 0.3, "segreuse_dense_layers": 0},
    "hybrid": BASE | {"segreuse_recompute_ratio": 0.2, "segreuse_dense_layers": 1},
    "everything": BASE | {"segreuse_recompute_ratio": 1.0, "segreuse_dense_layers": 0},
    "everything behind dense layers": BASE
    | {"segreuse_recompute_ratio": 1.0, "segreuse_dense_layers": 2},
}
EVERYTHING = [way for way in WAYS if way.startswith("everything")]
NOISE = 2e-3  # of float32

pytestmark = pytest.mark.skipif(
    len(CORES) < 2, reason=f"tensor parallelism needs 2 CPUs, one per rank; there is {len(CORES)}"
)


def ask_every_way(running: Engine) -> dict[str, list[Answer]]:
    """Two prompts of the same documents, together; documents exact each time."""
    text = Prompts(running.vocab_size, seed=31)
    documents = [text.tokens(300), text.tokens(200)]
    prompts = [text.around(documents[1], documents[0]), text.around(documents[0])]
    found = {}
    for way, options in WAYS.items():
        running.reset()
        if options is not None:
            running.ask(*documents, options=NAMESPACE, max_tokens=1)
        found[way] = running.ask(*prompts, options=options)
    return found


def tensor_parallel_engine(answers: Path) -> None:
    """Write the answers of an engine of two ranks, one core each."""
    with engine("qwen3", dtype="float32", tensor_parallel_size=2) as running:
        found = ask_every_way(running)
    plain = {way: [dataclasses.asdict(a) for a in given] for way, given in found.items()}
    answers.write_text(json.dumps(plain))


@pytest.fixture(scope="module")
def one_rank() -> dict[str, list[Answer]]:
    with engine("qwen3", dtype="float32") as running:
        return ask_every_way(running)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    path = tmp_path_factory.mktemp("tensor_parallel") / "answers.json"
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"}
    done = subprocess.run(
        [sys.executable, "-m", MODULE, str(path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert path.exists(), done.stdout[-6000:]
    return {way: [_answer(a) for a in found] for way, found in json.loads(path.read_text()).items()}


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


@pytest.mark.parametrize("way", WAYS)
def test_28_two_ranks_answer_as_one(
    way: str, two_ranks: dict[str, list[Answer]], one_rank: dict[str, list[Answer]]
) -> None:
    for two, one in zip(two_ranks[way], one_rank[way], strict=True):
        assert two.report == one.report
        assert_same(two, one, NOISE)


def test_the_comparison_can_fail(one_rank: dict[str, list[Answer]]) -> None:
    """Another choice of tokens answers differently, far beyond the noise."""
    for way, other in (("sparse", "shift"), ("hybrid", "plain")):
        with pytest.raises(AssertionError, match="log-probabilities differ"):
            assert_same(one_rank[way][0], one_rank[other][0], 5 * NOISE)


if __name__ == "__main__":
    tensor_parallel_engine(Path(sys.argv[1]))
