# SPDX-License-Identifier: Apache-2.0
"""fp8 KV caches: what is recomputed is what vLLM would have stored in the same format."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import BF16_NOISE, BLOCK_SIZE, NAMESPACE, Answer, Engine, Prompts, engine
from tests.e2e.test_equality import assert_same, check_everything
from vllm_segreuse.serve.offline import KnowledgeBase

pytestmark = pytest.mark.needs("fp8_cache")

NUM_BLOCKS = 161  # six prompts of 900 tokens fill them
REUSE = NAMESPACE | {"segreuse_min_reused_tokens": 16}
OTHER_PAIRS = pytest.mark.slow("other pairs of the same formats", instead="e2e/test_fp8")


@pytest.mark.shows("fp8", family="qwen3")
@pytest.mark.parametrize(
    ("kind", "dtype", "noise"),
    [
        # Numbers that are equal but for float32's rounding are stored as the same.
        ("fp8_e4m3", "float32", 2e-3),
        pytest.param("fp8_e5m2", "float32", 2e-3, marks=OTHER_PAIRS),
        # As in a bf16 cache: the spacing of these logits counts, not that of fp8.
        pytest.param("fp8_e4m3", "bfloat16", BF16_NOISE, marks=OTHER_PAIRS),
        ("fp8_e5m2", "bfloat16", BF16_NOISE),
    ],
)
def test_recomputing_everything_equals_plain_vllm(kind: str, dtype: str, noise: float) -> None:
    check_everything("qwen3", noise, dtype=dtype, kv_cache_dtype=kind)


@pytest.fixture(scope="module")
def reusing() -> Iterator[Engine]:
    with engine(
        "qwen3",
        segreuse={"knowledge_chunk_tokens": 256},
        dtype="float32",
        kv_cache_dtype="fp8_e4m3",
        num_gpu_blocks_override=NUM_BLOCKS,
    ) as running:
        yield running


def full_and_reused(running: Engine, options: dict[str, object]) -> tuple[Answer, Answer]:
    text = Prompts(running.vocab_size, seed=3)
    documents = [text.tokens(333), text.tokens(256)]
    prompt = text.around(*documents)
    running.reset()
    [full] = running.ask(prompt)
    running.reset()
    running.ask(*documents, options=NAMESPACE, max_tokens=1)
    [reused] = running.ask(prompt, options=REUSE | options)
    running.check_idle()
    return full, reused


def distance(one: Answer, other: Answer) -> float:
    first, second = one.logprobs[0], other.logprobs[0]
    return max(abs(first[t] - second[t]) for t in first.keys() & second.keys())


def test_some_of_the_reused_tokens_are_recomputed(reusing: Engine) -> None:
    full, shifted = full_and_reused(reusing, {"segreuse_policy": "shift"})
    assert shifted.report["reused_tokens"] > 500
    assert shifted.report["recomputed_tokens"] == 0
    assert 2e-3 < distance(full, shifted) < 0.3, "keys that were moved are keys still"
    _, repaired = full_and_reused(
        reusing, {"segreuse_policy": "cacheblend", "segreuse_recompute_ratio": 0.5}
    )
    assert 0 < repaired.report["recomputed_tokens"] < repaired.report["reused_tokens"]
    assert distance(full, repaired) < distance(full, shifted)


def test_the_drift_of_fp8_is_measured(reusing: Engine) -> None:
    options = {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.2}
    _, reused = full_and_reused(reusing, options)
    assert reused.report["drift"] > 0
    full, exact = full_and_reused(reusing, options | {"segreuse_max_drift": 0.0})
    assert exact.report["recomputed_tokens"] == exact.report["reused_tokens"]
    assert_same(exact, full, noise=2e-3)


def test_moves_by_whole_blocks_copy_bytes(reusing: Engine) -> None:
    """The exact tier: after an eviction in the middle answers are the same to the last bit."""
    text = Prompts(reusing.vocab_size, seed=4)
    prompt = text.tokens(20 * BLOCK_SIZE + 5)
    reusing.reset()
    [full] = reusing.ask(prompt)
    cached = [b for b in reusing.pool.blocks if b.block_hash is not None]
    assert len(cached) == 20
    reusing.pool.evict_blocks({cached[3].block_id})
    options = NAMESPACE | {"segreuse_policy": "exact", "segreuse_min_reused_tokens": 16}
    [again] = reusing.ask(prompt, options=options)
    assert again.report["reused_tokens"] >= 16 * BLOCK_SIZE
    assert (again.token_ids, again.logprobs) == (full.token_ids, full.logprobs)


def test_a_knowledge_base_holds_documents_in_fp8(reusing: Engine) -> None:
    text = Prompts(reusing.vocab_size, seed=5)
    document = text.tokens(300)
    reusing.reset()
    base = KnowledgeBase(reusing.llm, "handbook")
    [added] = base.add({"doc": document})
    assert added.status == "warm"
    for _ in range(6):  # evicts everything that is not frozen
        reusing.ask(text.tokens(900), max_tokens=1)
    options = {"extra_keys": ["handbook"], "segreuse_policy": "shift"}
    [answer] = reusing.ask(text.around(document), options=options)
    assert answer.report["reused_tokens"] >= 280
    base.delete()
    reusing.check_idle()
