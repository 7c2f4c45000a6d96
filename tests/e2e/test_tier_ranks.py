# SPDX-License-Identifier: Apache-2.0
"""Two ranks store and read each its own part of a row, and fail as one.

The two ranks live in processes of their own; as a script, this file is the engine above them:
    python -m tests.e2e.test_tier_ranks ANSWERS.json
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, Prompts, engine
from tests.e2e.ranks import CORES, NOISE, Breaking, run_script, write_answers
from tests.e2e.test_equality import assert_same
from tests.e2e.test_tier import IDLE, SHIFT, counts, evict

MODULE = "tests.e2e.test_tier_ranks"

pytestmark = [
    pytest.mark.slow(
        "two ranks, each with its part of a row", instead="e2e/test_tier e2e/test_tier_exact"
    ),
    pytest.mark.skipif(
        len(CORES) < 2,
        reason=f"tensor parallelism needs 2 CPUs, one per rank; there is {len(CORES)}",
    ),
]


def engine_of_two_ranks(path: Path) -> None:
    """Write what the same question gets from the cache, from host memory, and after errors."""
    with engine(
        "qwen3",
        segreuse={"tier": {"host_gib": 0.03, "min_run_tokens": 32}},
        dtype="float32",
        tensor_parallel_size=2,
        kv_cache_memory_bytes=4 << 20,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        worker_extension_cls=f"tests.e2e.ranks.{Breaking.__name__}",
    ) as running:
        text = Prompts(running.vocab_size, seed=20)
        document = text.tokens(230)
        donor, question = text.around(document), text.around(document, gaps=(11, 7))
        found: dict[str, Any] = {"in full": running.ask(question)}

        def ask(way: str, stores: str | None = None, loads: str | None = None) -> None:
            running.reset()
            running.ask(donor, options=SHIFT)
            if way != "cache":
                break_on_a_rank(running, stores)
                evict(running, text)
            break_on_a_rank(running, loads)
            found[way] = running.ask(question, options=SHIFT)
            running.check_idle()
            assert counts(running) | IDLE == counts(running), "rows are still held"

        ask("cache")
        ask("host")
        for rank in (0, 1):
            ask(f"load {rank}", loads=f"{rank} vllm_segreuse.prefill.mover.InPlace.load")
        ask("store 1", stores="1 vllm_segreuse.prefill.mover.InPlace.store")

        def restore(way: str, loads: str | None = None) -> None:
            running.reset()
            running.ask(donor, options=SHIFT)
            if way != "prefix hit":
                evict(running, text)
            break_on_a_rank(running, loads)
            found[way] = running.ask(donor, options=SHIFT)
            found[f"{way}, again"] = running.ask(donor)
            running.check_idle()
            assert counts(running) | IDLE == counts(running), "rows are still held"

        restore("prefix hit")
        restore("restored")
        restore("not restored", loads="1 vllm_segreuse.prefill.mover.InPlace.load")
        write_answers(path, found)


def break_on_a_rank(running: Engine, what: str | None) -> None:
    if what is not None:
        rank, name = what.split()
        running.llm.collective_rpc("break_on_rank", args=(int(rank), name))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("tier") / "answers.json"
    found, _ = run_script(MODULE, path)
    return {way: answer for way, [answer] in found.items()}


def test_two_ranks_reuse_from_the_host_bit_for_bit(answers: dict[str, Any]) -> None:
    host, cache = answers["host"], answers["cache"]
    assert host.report["tiered_tokens"] == cache.report["reused_tokens"] > 150
    assert cache.report["tiered_tokens"] == 0
    assert (host.token_ids, host.logprobs) == (cache.token_ids, cache.logprobs)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_read_both_compute_in_full(rank: int, answers: dict[str, Any]) -> None:
    answer = answers[f"load {rank}"]
    assert answer.report["tiered_tokens"] > 150, "as planned"
    assert_same(answer, answers["in full"], NOISE)


def test_two_ranks_restore_a_prefix_bit_for_bit(answers: dict[str, Any]) -> None:
    restored, hit = answers["restored"], answers["prefix hit"]
    assert restored.report["exact_tokens"] == restored.report["tiered_tokens"] == hit.cached_tokens
    assert hit.cached_tokens > 150
    assert (restored.token_ids, restored.logprobs) == (hit.token_ids, hit.logprobs)
    again = answers["restored, again"]
    assert again.cached_tokens == hit.cached_tokens, "it has its exact names"
    assert again.logprobs == hit.logprobs


def test_what_one_rank_could_not_restore_has_no_exact_name(answers: dict[str, Any]) -> None:
    answer = answers["not restored"]
    assert answer.report["recomputed_tokens"] == answer.report["reused_tokens"] > 150
    assert_same(answer, answers["prefix hit"], NOISE)
    assert answers["not restored, again"].cached_tokens == 0


def test_what_one_rank_could_not_store_nobody_reads(answers: dict[str, Any]) -> None:
    stored = answers["store 1"].report["tiered_tokens"]
    assert stored < answers["host"].report["tiered_tokens"]


if __name__ == "__main__":
    engine_of_two_ranks(Path(sys.argv[1]))
