# SPDX-License-Identifier: Apache-2.0
"""Documents of a knowledge base on a real engine: computed behind others, as in full prefill."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.engine import BF16_NOISE, BLOCK_SIZE, Engine, Prompts, engine
from tests.parts import parts_of
from vllm_segreuse.serve import offline
from vllm_segreuse.serve.offline import KnowledgeBase

pytestmark = pytest.mark.e2e

KEYS = {"extra_keys": ["base"]}
LENGTHS = {"a": 100, "b": 300, "c": 64, "d": 200, "e": 90}


def whole(tokens: list[int]) -> list[int]:
    """Their full blocks."""
    return tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine("qwen3", {"policy": "shift", "min_reused_tokens": 32}) as running:
        yield running


@pytest.fixture
def text(running: Engine) -> dict[str, list[int]]:
    dice = Prompts(running.vocab_size, seed=71)
    return {name: dice.tokens(length) for name, length in LENGTHS.items()}


@pytest.fixture
def hits(
    running: Engine, text: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[int, int]]]:
    """Makes the base; (tokens, those that were cached) of each prompt that computed a document."""
    seen, was_frozen = [], offline.was_frozen

    def watched(output: Any) -> bool:
        seen.append((len(output.prompt_token_ids), output.num_cached_tokens))
        return was_frozen(output)

    monkeypatch.setattr(offline, "was_frozen", watched)
    running.reset()
    base = KnowledgeBase(running.llm, "base")
    assert {document.status for document in base.add(text)} == {"warm"}
    yield seen
    base.delete()


def test_the_context_that_documents_share_is_computed_once(hits: list[tuple[int, int]]) -> None:
    # `a` and `b` have contexts of their own; that of `b` begins with `a`, as that of `c` does.
    shared = (LENGTHS["a"] + LENGTHS["b"]) // BLOCK_SIZE * BLOCK_SIZE
    of_c = LENGTHS["a"] // BLOCK_SIZE * BLOCK_SIZE
    assert [cached for _, cached in hits] == [0, 0, of_c, shared, shared]
    assert all(tokens % BLOCK_SIZE == 0 for tokens, _ in hits)


def test_behind_its_siblings_a_document_is_an_exact_prefix(
    running: Engine, text: dict[str, list[int]], hits: list[tuple[int, int]]
) -> None:
    prefix = whole(text["a"] + text["b"]) + text["d"]
    question = prefix + Prompts(running.vocab_size, seed=72).tokens(9)
    frozen = running.ask(question)[0]
    assert frozen.cached_tokens == len(whole(prefix))
    KnowledgeBase(running.llm, "base").delete()
    running.reset()
    running.ask(prefix, max_tokens=1)
    full = running.ask(question)[0]
    assert full.cached_tokens == frozen.cached_tokens
    # The context was computed in a request of its own: equal within bf16, not to the bit.
    assert frozen.token_ids == full.token_ids
    for ours, theirs in zip(frozen.logprobs, full.logprobs, strict=True):
        shared = ours.keys() & theirs.keys()
        assert max(abs(ours[token] - theirs[token]) for token in shared) <= BF16_NOISE
    KnowledgeBase(running.llm, "base")


def test_what_is_moved_is_the_document_and_not_the_context_of_another(
    running: Engine, text: dict[str, list[int]], hits: list[tuple[int, int]]
) -> None:
    side = running.scheduler.connector.scheduler_side
    frozen = set(parts_of(side).entries.block_ids)
    assert {
        block for block in range(running.pool.num_gpu_blocks) if block in running.index
    } == frozen
    dice = Prompts(running.vocab_size, seed=73)
    prompt = [*dice.tokens(5), *text["b"], *dice.tokens(7), *text["a"], *dice.tokens(9)]
    answer = running.ask(prompt, options=KEYS)[0]
    assert answer.report["reused_tokens"] == LENGTHS["a"] + LENGTHS["b"]
    found = {
        document.id: document.hits for document in KnowledgeBase(running.llm, "base").documents()
    }
    assert found == {"a": 1, "b": 1, "c": 0, "d": 0, "e": 0}


def test_of_a_deleted_lead_nothing_is_left(
    running: Engine, text: dict[str, list[int]], hits: list[tuple[int, int]]
) -> None:
    base = KnowledgeBase(running.llm, "base")
    base.remove("a")
    assert {document.status for document in base.documents()} == {"warm"}
    dice = Prompts(running.vocab_size, seed=74)
    for name, context in (("b", "cd"), ("c", "bd"), ("d", "bc"), ("e", "bc")):
        first, second = context
        prefix = whole(text[first] + text[second]) + text[name]
        answer = running.ask(prefix + dice.tokens(5))[0]
        assert answer.cached_tokens == len(whole(prefix))
