# SPDX-License-Identifier: Apache-2.0
"""Lookup: what matching a prompt, indexing its blocks and evicting them costs the scheduler.

A 16,384-token prompt against 100,000 and 1,000,000 indexed blocks of 32 tokens. "hit": the prompt
is eight stored passages at random places, every token of it is found; "miss": no token is. Both
sizes are measured in turn, so that a busy machine slows both. Matching includes the anchors, not
the window hashes, which are made once per prompt outside of the scheduling loop (`hash_ms`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.suites import waiting
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import find_matches, warm_up
from vllm_segreuse.cache.rolling_hash import window_hashes

Tokens = npt.NDArray[np.int32]

BLOCK_SIZE = 32
PROMPT_TOKENS = 16_384
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
PASSAGE_BLOCKS = 64
SIZES = (100_000, 1_000_000)
VOCABULARY = 150_000


def run(quick: bool) -> dict[str, Any]:
    """Measure, and return `{"rows": [...], "summary": {...}}`; times are medians."""
    warm_up()
    rng = np.random.default_rng(0)
    indexes = {size: _filled_index(size, rng) for size in SIZES}
    match_ms = _match_times(indexes, 40 if quick else 200, rng)
    churned = indexes[SIZES[0]]
    insert_us, remove_us = _churn_times(churned, 20 if quick else 100, rng)
    rows: list[dict[str, Any]] = [
        {"case": case, "indexed_blocks": size, "ms": ms} for (case, size), ms in match_ms.items()
    ]
    rows += [
        {"case": "insert", "indexed_blocks": len(churned), "us_per_block": insert_us},
        {"case": "remove", "indexed_blocks": len(churned), "us_per_block": remove_us},
    ]
    small, large = SIZES
    summary = {
        "match_ms_hit": match_ms["hit", small],
        "match_ms_miss": match_ms["miss", small],
        "match_ms_hit_1m": match_ms["hit", large],
        "match_ms_miss_1m": match_ms["miss", large],
        "growth_hit": match_ms["hit", large] / match_ms["hit", small],
        "growth_miss": match_ms["miss", large] / match_ms["miss", small],
        "hash_ms": match_ms["hash", small],
        "insert_us_per_block": insert_us,
        "remove_us_per_block": remove_us,
    }
    waiting_rows, waiting_summary = waiting.run(quick)
    return {"rows": rows + waiting_rows, "summary": summary | waiting_summary}


def _random_tokens(count: int, rng: np.random.Generator) -> Tokens:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _filled_index(size: int, rng: np.random.Generator) -> SegmentIndex:
    """An index full of random prompts, their blocks scattered over the pool."""
    index = SegmentIndex(size, BLOCK_SIZE)
    ids = rng.permutation(size).astype(np.int32)
    for first in range(0, size, PROMPT_BLOCKS):
        batch = ids[first : first + PROMPT_BLOCKS]
        index.insert(0, batch, _random_tokens(batch.size * BLOCK_SIZE, rng), 0)
    index.begin_step()
    return index


def _stored_prompt(index: SegmentIndex, rng: np.random.Generator) -> Tokens:
    """Passages of whole blocks, each a stretch of one stored prompt."""
    starts = index.nodes["first_child"] >= 0
    passages: list[Tokens] = []
    while len(passages) < PROMPT_BLOCKS // PASSAGE_BLOCKS:
        block = int(rng.integers(index.num_blocks))
        if not starts[block]:
            continue
        chain = list(_chain(index, block))
        if len(chain) == PASSAGE_BLOCKS:
            passages.append(index.tokens[chain].reshape(-1))
    return np.concatenate(passages)


def _chain(index: SegmentIndex, block: int) -> Iterator[int]:
    for _ in range(PASSAGE_BLOCKS):
        if block < 0:
            return
        yield block
        block = int(index.nodes[block]["first_child"])


def _match_times(
    indexes: dict[int, SegmentIndex], repeats: int, rng: np.random.Generator
) -> dict[tuple[str, int], float]:
    """Median milliseconds by (case, indexed blocks)."""
    # All prompts first: putting one together would warm the caches for its own lookup.
    prompts = [
        [
            (case, size, prompt)
            for size, index in indexes.items()
            for case, prompt in (
                ("hit", _stored_prompt(index, rng)),
                ("miss", _random_tokens(PROMPT_TOKENS, rng)),
            )
        ]
        for _ in range(repeats)
    ]
    times: dict[tuple[str, int], list[float]] = {}
    for one_of_each in prompts:
        for case, size, prompt in one_of_each:
            begin = time.perf_counter()
            hashes = window_hashes(prompt, BLOCK_SIZE)
            hashed = time.perf_counter()
            matches = find_matches(indexes[size], 0, prompt, hashes, 0, PROMPT_TOKENS, 0)
            end = time.perf_counter()
            expected = PROMPT_TOKENS if case == "hit" else 0
            if matches.num_tokens != expected:
                raise RuntimeError(
                    f"{case} among {size} blocks: matched {matches.num_tokens} tokens instead of "
                    f"{expected}, so its time means nothing: run tests/cache"
                )
            times.setdefault((case, size), []).append(1e3 * (end - hashed))
            times.setdefault(("hash", size), []).append(1e3 * (hashed - begin))
    return {key: statistics.median(values) for key, values in times.items()}


def _churn_times(
    index: SegmentIndex, repeats: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Median microseconds per block: to index a prompt in one batch, to evict one by one."""
    insert_us, remove_us = [], []
    for _ in range(repeats):
        ids = rng.choice(index.num_blocks, PROMPT_BLOCKS, replace=False).astype(np.int32)
        tokens, listed = _random_tokens(PROMPT_TOKENS, rng), ids.tolist()
        begin = time.perf_counter()
        for block in listed:
            index.remove([block])
        removed = time.perf_counter()
        index.insert(0, ids, tokens, 0)
        end = time.perf_counter()
        remove_us.append(1e6 * (removed - begin) / PROMPT_BLOCKS)
        insert_us.append(1e6 * (end - removed) / PROMPT_BLOCKS)
    return statistics.median(insert_us), statistics.median(remove_us)
