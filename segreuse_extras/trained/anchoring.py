# SPDX-License-Identifier: Apache-2.0
"""Documents of a model that reads anchors in the place of text (`anchors.py`).

    chunk 1      start c c c c a1 a2                a1 a2 are kept
    chunk 2      start a1 a2 c c c c a1 a2          the first a1 a2 are copied, the last kept
    document     start a1 a2 a1 a2 end              all copied but start and end: the entry

What is kept of the chunks is an entry of its own until the document is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from segreuse_extras.compressed.orders import AnchorOrder
from segreuse_extras.trained.anchors import Anchors
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.engine import Engine, NotFrozenError, all_frozen
from vllm_segreuse.features.knowledge.errors import InvalidError
from vllm_segreuse.features.knowledge.isolated import StandIns
from vllm_segreuse.features.knowledge.store import Tokens
from vllm_segreuse.options.parsing import ANCHORS, EXTRA_KEYS, FREEZE
from vllm_segreuse.plan import FreezeOrder

_ATTEMPTS = 2
"""What was kept of a chunk may be evicted before the next one is computed."""


@dataclass(frozen=True)
class Anchoring(StandIns):
    """Anchors of a model."""

    anchors: Anchors

    def standing_for(self, num_tokens: int) -> list[int]:
        return self.anchors.standing_for(num_tokens)

    async def freeze(
        self, engine: Engine, extra_key: str, tokens: Tokens, order: FreezeOrder
    ) -> bool:
        chunks = f"{order.entry}-chunks"
        for left in reversed(range(_ATTEMPTS)):
            try:
                if await self._frozen(engine, extra_key, tokens.tolist(), order, chunks):
                    return True
            except NotFrozenError:
                if not left:
                    raise
            finally:
                await engine.unfreeze([chunks])
        return False

    async def _frozen(
        self, engine: Engine, extra_key: str, tokens: list[int], order: FreezeOrder, chunks: str
    ) -> bool:
        start, *text, end = tokens
        cut = list(self.anchors.chunks(text))
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


class AnchoredShape(Shape):
    """Of documents that anchors stand for: each is given as it is, and computed chunk by chunk."""

    @property
    def anchors(self) -> Anchors:
        """What stands for documents."""
        assert isinstance(self.stand_ins, Anchoring)
        return self.stand_ins.anchors

    def num_anchors(self, num_tokens: int) -> int:
        """Tokens that stand for a document of so many, its start and end token included."""
        return len(self.anchors.standing_for(num_tokens - 2)) + 2

    def num_chunks(self, num_context: int, num_tokens: int) -> int:
        """One.

        Raises:
            InvalidError: the document is too long.
        """
        longest = self.num_anchors(num_tokens) + self.anchors.chunk_tokens
        if longest > self.max_prompt_tokens:
            raise InvalidError(
                f"a document of {num_tokens} tokens and its anchors take {longest} where it is "
                f"computed, and prompts have {self.max_prompt_tokens} at most: cut it into several",
                "documents",
            )
        return 1

    def num_blocks(self, num_context: int, num_tokens: int) -> int:
        """Blocks that a document's anchors take when it is warm."""
        return -(-self.num_anchors(num_tokens) // self.block_size)

    def num_blocks_meanwhile(self, num_tokens: int) -> int:
        """Blocks of what is kept of each chunk."""
        blocks, so_far = 0, 0
        for chunk, behind in self.anchors.chunks(range(num_tokens - 2)):
            first = 1 + so_far + len(chunk)
            so_far += len(behind)
            blocks += -(-(first + len(behind)) // self.block_size) - first // self.block_size
        return blocks

    def prompts(self, context: Tokens, tokens: Tokens) -> list[Tokens]:
        """The document."""
        return [tokens]
