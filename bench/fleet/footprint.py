# SPDX-License-Identifier: Apache-2.0
"""What an engine's index and a router's knowledge take, by building them: the index that the plugin
has, filled, and the scorer of `segreuse_tools.scoring` in front of so many engines' answers."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from bench import harness
from segreuse_tools.routing import document_digests
from segreuse_tools.scoring import Scorer
from vllm_segreuse.cache.index import SegmentIndex, bytes_per_block
from vllm_segreuse.features.knowledge.schemas import EngineHoldings, HeldDocument, Holdings

POLLED_EVERY_S = 2.0
"""The scorer's `max_age_s`, unless another is chosen."""

_PROMPT_BLOCKS = 256
_DOCUMENTS_ASKED = 6
_ASKED = 50


def in_new_process(make: Callable[..., harness.Row], *given: int) -> harness.Row:
    """A row of this module, where no memory is that others have used and left."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(make, *given).result()


def index_row(cache_tokens: int, block_size: int) -> harness.Row:
    """Bytes of the index of a full KV cache, all of whose blocks may be reused."""
    _filled(_PROMPT_BLOCKS, block_size)  # compiled by now
    before = _resident_bytes()
    index = _filled(cache_tokens // block_size, block_size)
    taken = _resident_bytes() - before
    assert len(index) == cache_tokens // block_size
    return {
        "of": "index",
        "cache_tokens": cache_tokens,
        "block_size": block_size,
        "resident_bytes": taken,
        "bytes_per_token": taken / cache_tokens,
        "reserved_per_token": bytes_per_block(block_size) / block_size,
    }


def _filled(blocks: int, block_size: int) -> SegmentIndex:
    index, rng = SegmentIndex(blocks, block_size), np.random.default_rng(0)
    for first in range(0, blocks, _PROMPT_BLOCKS):
        ids = np.arange(first, min(blocks, first + _PROMPT_BLOCKS), dtype=np.int32)
        tokens = rng.integers(0, 1 << 17, ids.size * block_size, np.int32)
        index.insert(0, ids, tokens, 0)
    return index


def router_row(engines: int, documents: int) -> harness.Row:
    """A scorer that has asked all engines, each of which holds so many documents: what it takes,
    how long it is busy with their answers, and how long a request's scores take.

    The network takes no time here, so `refresh_s` is what the router's processor does.
    """
    bodies = {f"engine{it}": _answer(it, documents) for it in range(engines)}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=bodies[request.url.host])

    before = _resident_bytes()
    urls = {name: f"http://{name}" for name in bodies}
    scorer = Scorer(urls, "token", max_age_s=1e9, transport=httpx.MockTransport(answer))
    wanted = document_digests([f"0/{it}" for it in range(_DOCUMENTS_ASKED)])
    began = time.process_time()
    assert scorer.best(wanted) == "engine0"
    refresh_s = time.process_time() - began
    taken = _resident_bytes() - before
    began = time.process_time()
    for _ in range(_ASKED):
        scorer.scores(wanted)
    score_s = (time.process_time() - began) / _ASKED
    scorer.close()
    size = len(bodies["engine0"])
    return {
        "of": "router",
        "engines": engines,
        "documents": documents,
        "answer_bytes": size,
        "state_bytes": taken,
        "refresh_s": refresh_s,
        "score_ms": 1e3 * score_s,
        "polled_bytes_s": engines * size / POLLED_EVERY_S,
    }


def _answer(engine: int, documents: int) -> bytes:
    held = HeldDocument(tokens=512, tier="gpu")
    digests = document_digests([f"{engine}/{it}" for it in range(documents)])
    holdings = EngineHoldings(documents=dict.fromkeys(digests, held))
    return Holdings(engines=[holdings]).model_dump_json().encode()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
