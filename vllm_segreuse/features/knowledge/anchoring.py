# SPDX-License-Identifier: Apache-2.0
"""Documents of a model that reads anchors in the place of text
(`model/documents/anchors.py`).

    chunk 1      start c c c c a1 a2                a1 a2 are kept
    chunk 2      start a1 a2 c c c c a1 a2          the first a1 a2 are copied, the last kept
    document     start a1 a2 a1 a2 end              all copied but start and end: the entry

What is kept of the chunks is an entry of its own until the document is made.
"""

from __future__ import annotations

from vllm_segreuse.features.knowledge.engine import Engine, NotFrozenError, all_frozen
from vllm_segreuse.features.knowledge.store import Tokens
from vllm_segreuse.model.documents.anchors import Anchors
from vllm_segreuse.options.parsing import ANCHORS, EXTRA_KEYS, FREEZE
from vllm_segreuse.plan import AnchorOrder, FreezeOrder

_ATTEMPTS = 2
"""What was kept of a chunk may be evicted before the next one is computed."""


async def condense(
    engine: Engine, anchors: Anchors, extra_key: str, tokens: Tokens, order: FreezeOrder
) -> bool:
    """Compute a document, and freeze its anchors.

    Args:
        tokens: of the document, its start and end token included.
        order: to freeze it.

    Returns:
        Whether they are frozen.

    Raises:
        NotFrozenError: they are not, for this reason.
    """
    chunks = f"{order.entry}-chunks"
    for left in reversed(range(_ATTEMPTS)):
        try:
            if await _condensed(engine, anchors, extra_key, tokens.tolist(), order, chunks):
                return True
        except NotFrozenError:
            if not left:
                raise
        finally:
            await engine.unfreeze([chunks])
    return False


async def _condensed(
    engine: Engine,
    anchors: Anchors,
    extra_key: str,
    tokens: list[int],
    order: FreezeOrder,
    chunks: str,
) -> bool:
    start, *text, end = tokens
    cut = list(anchors.chunks(text))
    so_far: list[int] = []

    async def frozen(prompt: list[int], freeze: FreezeOrder, kept: int) -> bool:
        asked = {
            EXTRA_KEYS: [extra_key],
            FREEZE: freeze.encode(),
            ANCHORS: AnchorOrder(chunks, len(so_far), kept).encode(),
        }
        answers = await engine.answers(prompt, asked)
        return all_frozen(answer.report for answer in answers)

    for part, (chunk, behind) in enumerate(cut):
        prompt = [start, *so_far, *chunk, *behind]
        first = len(prompt) - len(behind)
        if not await frozen(prompt, FreezeOrder(chunks, part, len(cut), first), len(behind)):
            return False
        so_far += behind
    return await frozen([start, *so_far, end], order, len(so_far) + 2)
