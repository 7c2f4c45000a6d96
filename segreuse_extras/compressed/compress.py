# SPDX-License-Identifier: Apache-2.0
"""Documents of which a share of the tokens is kept: how many, which, and how these are computed.

Each chunk is computed in full behind the document's context, as any other. Then a scorer says which
of its tokens are kept, and their KV is copied to blocks of its own; what was computed in full stays
in vLLM's cache until that needs the room.

    attention   the largest share that the chunk, read once more, pays to a token with any head at
                any layer (the score of KVzip, arXiv 2505.23416, for tokens instead of single heads)
    surprise    how little the model expected a token: minus its log-probability (LLMLingua,
                arXiv 2310.05736, which drops text instead of KV)
    uniform     every n-th token, the control
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from segreuse_extras.compressed.orders import CopyOrder, ScoreOrder
from vllm_segreuse.features.knowledge.compression import CompressionSettings
from vllm_segreuse.features.knowledge.engine import Engine, NotFrozenError, all_frozen
from vllm_segreuse.features.knowledge.store import Tokens
from vllm_segreuse.features.knowledge.work import Work
from vllm_segreuse.options.parsing import COPY, EXTRA_KEYS, FREEZE, SCORE
from vllm_segreuse.plan import FreezeOrder

_ATTEMPTS = 2
"""What was computed in full may be evicted before it is copied."""


async def compress(engine: Engine, work: Work, order: FreezeOrder) -> tuple[Tokens, bool]:
    """Compute a part of a compressed document, and freeze what is kept.

    Returns:
        Positions of the chunk that are kept, and whether they are frozen.

    Raises:
        RuntimeError: the engine could not say which are to be kept.
        NotFrozenError: they are not frozen, for this reason.
    """
    kept = None if work.kept is None else work.kept[order.part]
    for left in reversed(range(_ATTEMPTS)):
        asks = kept is None and _compression(work).scorer == "surprise"
        found = await engine.answers(
            work.prompts[order.part].tolist(), {}, prompt_logprobs=0 if asks else None
        )
        if kept is None:
            kept = await _chosen(engine, work, order.part, found[0].logprobs)
        try:
            if kept is not None and await _copied(engine, work, order, kept):
                return kept, True
        except NotFrozenError:
            if not left:
                raise
    if kept is None:
        raise RuntimeError("the model gave its tokens no scores")
    return kept, False


async def _chosen(
    engine: Engine, work: Work, part: int, logprobs: Sequence[float] | None
) -> Tokens | None:
    """Positions of a chunk that are kept, ascending; None: there are no scores."""
    compression, length = _compression(work), work.lengths[part]
    count = compression.count(length)
    if count == length:
        return np.arange(length, dtype=np.int32)
    if compression.scorer == "uniform":
        return ((np.arange(count) + 0.5) * length / count).astype(np.int32)
    first, stop = work.num_context, work.num_context + length
    if compression.scorer == "surprise":
        if logprobs is None or not np.isfinite(logprobs[first:stop]).all():
            return None
        order = np.argsort(np.asarray(logprobs[first:stop]), kind="stable")
        return np.sort(order[:count]).astype(np.int32)
    source = work.prompts[part][:stop]
    prompt = np.concatenate((source, source[first:], source[-1:])).tolist()
    asked = {SCORE: ScoreOrder(first, stop, count).encode(), EXTRA_KEYS: [work.extra_key]}
    [answer, *_] = await engine.answers(prompt, asked)
    chosen = answer.report.get("chosen")
    return None if chosen is None else np.asarray(chosen, np.int32) - first


async def _copied(engine: Engine, work: Work, order: FreezeOrder, kept: Tokens) -> bool:
    """Copy tokens of a chunk to blocks of their own, and freeze these; on every engine."""
    size = (await engine.frozen())["block_size"]
    source = work.prompts[order.part][: work.num_context + work.lengths[order.part]]
    positions = kept + work.num_context
    tokens = source[positions]
    # vLLM computes the last token of a prompt itself, and names full blocks only.
    filler = np.repeat(tokens[-1:], size - len(tokens) % size + 1)
    asked: Mapping[str, Any] = {
        EXTRA_KEYS: [work.extra_key],
        FREEZE: order._replace(first_token=0).encode(),
        COPY: CopyOrder(source.tolist(), positions.tolist()).encode(),
    }
    prompt = np.concatenate((tokens, filler)).tolist()
    answers = await engine.answers(prompt, asked)
    return all_frozen(answer.report for answer in answers)


def _compression(work: Work) -> CompressionSettings:
    assert work.compression is not None
    return work.compression
