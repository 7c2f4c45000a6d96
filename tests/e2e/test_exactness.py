# SPDX-License-Identifier: Apache-2.0
"""Approximate KV never passes for exact (failure cases 29), and exact KV is never lost to it."""

import random
from collections.abc import Iterator

import pytest

from tests.e2e.engine import BF16_NOISE, BLOCK_SIZE, NAMESPACE, Engine, Prompts, engine

SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}


@pytest.fixture(scope="module")
def plain_answers() -> dict[str, list]:
    """What a fresh engine without the plugin answers: prompts cold, then as prefix hits."""
    with engine("qwen3", segreuse=False) as plain:
        documents, prompts = approximate_prompts(plain.vocab_size)
        cold = [plain.ask(prompt)[0] for prompt in prompts]
        again = [plain.ask(prompt)[0] for prompt in prompts]
        return {"documents": documents, "prompts": prompts, "cold": cold, "again": again}


def approximate_prompts(vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """20 prompts over the same documents in random order, each behind text of its own."""
    text, order = Prompts(vocab_size, seed=7), random.Random(7)
    documents = [text.tokens(n) for n in (200, 131, 310, 96)]
    prompts = [
        text.around(*order.sample(documents, 3), gaps=(order.randrange(1, 60), 9, 2, 17))
        for _ in range(20)
    ]
    return documents, prompts


@pytest.fixture(scope="module")
def reusing(plain_answers: dict[str, list]) -> Iterator[Engine]:
    # After the plain engine has gone: vLLM has one connector per process.
    with engine("qwen3") as running:
        yield running
        running.check_idle()


def test_29_plain_requests_after_approximate_ones_are_bit_identical(
    reusing: Engine, plain_answers: dict[str, list]
) -> None:
    prompts = plain_answers["prompts"]
    reusing.ask(*plain_answers["documents"], options=NAMESPACE, max_tokens=1)
    approximate = [reusing.ask(p, options=SHIFT, max_tokens=40)[0] for p in prompts]
    assert all(a.report["reused_tokens"] > 0 for a in approximate)
    for repeat in ("cold", "again"):
        for prompt, reference in zip(prompts, plain_answers[repeat], strict=True):
            answer = reusing.ask(prompt)[0]
            assert answer.cached_tokens == reference.cached_tokens
            assert answer.token_ids == reference.token_ids
            assert answer.logprobs == reference.logprobs


def test_29_decoding_behind_reused_kv_leaves_no_exact_name(reusing: Engine) -> None:
    text = Prompts(reusing.vocab_size, seed=8)
    document = text.tokens(256)
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    prompt = text.around(document)
    answer = reusing.ask(prompt, options=SHIFT, max_tokens=3 * BLOCK_SIZE, ignore_eos=True)[0]
    assert answer.report["reused_tokens"] == len(document)
    follow_up = reusing.ask(prompt + answer.token_ids + text.tokens(5))[0]
    assert follow_up.cached_tokens == 0


def test_a_prompt_of_reused_text_keeps_its_exact_prefix(reusing: Engine) -> None:
    text = Prompts(reusing.vocab_size, seed=10)
    preamble, document = text.tokens(3 * BLOCK_SIZE), text.tokens(9 * BLOCK_SIZE)
    reusing.ask(document, preamble + text.tokens(9), options=NAMESPACE, max_tokens=1)
    answer = reusing.ask(preamble + text.tokens(7) + document + text.tokens(8), options=SHIFT)[0]
    assert answer.report["prefix_tokens"] == len(preamble)
    assert answer.report["reused_tokens"] == len(document)
    assert answer.report["new_tokens"] == 15
    assert answer.report["matches"] == 1


def test_a_shift_by_zero_in_the_same_context_equals_prefix_caching(reusing: Engine) -> None:
    text = Prompts(reusing.vocab_size, seed=11)
    document = text.tokens(9 * BLOCK_SIZE)
    question = document + text.tokens(8)
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    by_prefix = reusing.ask(question)[0]
    assert by_prefix.cached_tokens == len(document)
    # Without its first block the prefix is lost to vLLM; the rest still lies where it belongs.
    reusing.reset()
    reusing.ask(document, options=NAMESPACE, max_tokens=1)
    first = next(b for b in reusing.pool.blocks if b.block_hash and b.block_id in reusing.index)
    reusing.pool.evict_blocks({first.block_id})
    by_segment = reusing.ask(question, options=SHIFT)[0]
    assert by_segment.report["prefix_tokens"] == 0
    assert by_segment.report["reused_tokens"] == len(document) - BLOCK_SIZE
    # The lost block is computed in another batch than it was: equal within bf16, not to the bit.
    assert by_segment.token_ids == by_prefix.token_ids
    for ours, theirs in zip(by_segment.logprobs, by_prefix.logprobs, strict=True):
        shared = ours.keys() & theirs.keys()
        assert max(abs(ours[t] - theirs[t]) for t in shared) <= BF16_NOISE
