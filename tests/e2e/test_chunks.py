# SPDX-License-Identifier: Apache-2.0
"""Prompts longer than a chunk: a pass holds no more tokens than vLLM profiled memory for."""

from collections.abc import Iterator

import pytest

from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts, engine

BASE = NAMESPACE | {"segreuse_min_reused_tokens": 16, "segreuse_policy": "sparsex"}
WAYS = {
    "shift": BASE | {"segreuse_policy": "shift"},
    "sparse": BASE | {"segreuse_dense_layers": 0, "segreuse_recompute_ratio": 0.3},
    "hybrid": BASE | {"segreuse_dense_layers": 2, "segreuse_recompute_ratio": 0.2},
    "everything": BASE | {"segreuse_dense_layers": 1, "segreuse_recompute_ratio": 1.0},
    "focus": BASE | {"segreuse_policy": "focus", "segreuse_recompute_ratio": 0.2},
    "prophet": BASE | {"segreuse_policy": "prophet", "segreuse_recompute_ratio": 0.2},
}


def answers(running: Engine) -> dict[str, list[Answer]]:
    """Two prompts per policy, asked together; documents exact each time. What the first asks is
    longer than a small chunk."""
    text = Prompts(running.vocab_size, seed=4)
    documents = [text.tokens(n) for n in (384, 320, 160)]
    asked = text.tokens(150)
    prompts = [text.around(*documents) + asked, text.around(documents[1], documents[0])]
    found = {}
    for way, options in WAYS.items():
        running.reset()
        running.ask(*documents, options=NAMESPACE, max_tokens=1)
        found[way] = running.ask(*prompts, options=options)
    running.reset()
    found["plain"] = running.ask(*prompts)
    return found


def difference(one: Answer, other: Answer) -> float:
    shared = one.logprobs[0].keys() & other.logprobs[0].keys()
    return max(abs(one.logprobs[0][t] - other.logprobs[0][t]) for t in shared)


@pytest.fixture(scope="module")
def in_one_chunk() -> dict[str, list[Answer]]:
    with engine("qwen3", dtype="float32") as running:
        return answers(running)


@pytest.fixture(scope="module")
def in_many_chunks(in_one_chunk: dict[str, list[Answer]]) -> Iterator[dict[str, list[Answer]]]:
    with engine("qwen3", dtype="float32", max_num_batched_tokens=128) as running:
        yield answers(running)
        running.check_idle()


@pytest.mark.parametrize("way", [*WAYS, "plain"])
def test_36_many_chunks_give_the_same_result_as_one(
    way: str, in_one_chunk: dict[str, list[Answer]], in_many_chunks: dict[str, list[Answer]]
) -> None:
    for one, many in zip(in_one_chunk[way], in_many_chunks[way], strict=True):
        drift = one.report["drift"]  # chunks are other batches
        rounded = {} if drift is None else {"drift": pytest.approx(drift, rel=0.02)}
        assert many.report == one.report | rounded
        assert one.token_ids == many.token_ids
        assert difference(one, many) < 2e-3


def test_everything_in_chunks_equals_plain(in_many_chunks: dict[str, list[Answer]]) -> None:
    for ours, plain in zip(in_many_chunks["everything"], in_many_chunks["plain"], strict=True):
        assert difference(ours, plain) < 2e-3
        assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] > 700


def test_policies_differ_as_they_should(in_one_chunk: dict[str, list[Answer]]) -> None:
    """More recomputation, less drift; without this the equalities above could be vacuous."""
    drift = {
        way: max(
            difference(a, b) for a, b in zip(in_one_chunk[way], in_one_chunk["plain"], strict=True)
        )
        for way in WAYS
    }
    assert drift["shift"] > 20e-3
    assert drift["everything"] < 2e-3
