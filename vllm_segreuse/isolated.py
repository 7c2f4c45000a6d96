# SPDX-License-Identifier: Apache-2.0
"""Requests to a model that was trained on documents computed alone.

For such a model, KV of a document that was computed in its place is wrong. So a request with
documents is planned once all of them are there, waits while they are computed, or ends with an
error; it never runs as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.isolated import IsolatedDocument, IsolatedFinder, padded
from vllm_segreuse.cold_documents import ColdDocuments
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.config import EXTRA_KEYS
from vllm_segreuse.documents.layout import Layout, LayoutError, Span
from vllm_segreuse.plan import BoolArray, IntArray, Recipe, Segments

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.segreuse")

POLICY = "link"
"""What reports call it. It is no choice: such a model has no other."""

PRIVATE = "segreuse-private"
"""First of the extra keys of a request that has none."""


def recipe(reused: BoolArray, segments: Segments) -> Recipe:
    """Link tokens and new text are computed, and nothing of a document."""
    return Recipe.without_choice(~reused)


class IsolatedRequests:
    """Those of one engine.

    Args:
        layout: of prompts.
        pool: vLLM's blocks.
        index: which blocks a namespace knows.
        max_tokens: longest prompt, its answer included.
    """

    def __init__(
        self, layout: Layout, pool: SegmentBlockPool, index: SegmentIndex, max_tokens: int
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._index = index
        self._max_tokens = max_tokens
        self._spans: dict[str, Sequence[Span]] = {}
        self._finders: dict[str, IsolatedFinder] = {}
        self._failed: dict[str, str] = {}
        self._extra_keys: dict[str, tuple[str, ...]] = {}
        self.cold = ColdDocuments(pool, self._alone)

    def arrived(self, request: Request) -> bool:
        """Whether a request has documents."""
        if self.cold.is_own(request.request_id):
            return False
        try:
            spans = self._layout.spans(request.prompt_token_ids or ())
        except LayoutError as error:
            spans = (Span(0, request.num_prompt_tokens),)  # of which nothing is known to be right
            self.fail(request, str(error))
        if spans:
            self._spans[request.request_id] = spans
        return bool(spans)

    def finder(
        self, request: Request, extra_keys: tuple[str, ...], namespace: int
    ) -> IsolatedFinder:
        """Of the documents of a request that has arrived."""
        self._extra_keys[request.request_id] = extra_keys
        size, tokens = self._index.block_size, request.prompt_token_ids or ()
        documents = []
        for start, stop in self._spans[request.request_id]:
            alone = padded(tokens[start:stop], size)
            if len(alone) >= self._max_tokens:
                self.fail(request, f"a document of {stop - start} tokens is too long")
            resident = self._resident(self._alone("", request, alone), namespace)
            documents.append(IsolatedDocument(start, stop, alone, resident))
        finder = self._finders[request.request_id] = IsolatedFinder(documents, size)
        return finder

    def _resident(self, alone: Request, namespace: int) -> Callable[[], IntArray | None]:
        count = len(alone.block_hashes)

        def resident() -> IntArray | None:
            blocks = self._pool.resident_blocks(alone, 0, count)
            is_known = (blocks >= 0).all() and not self._index.missing(namespace, blocks).size
            return blocks if is_known else None

        return resident

    def needs_plan(self, request: Request, start: int) -> bool:
        """Whether a document of the request lies behind its prefix hit, or the request failed."""
        return any(stop > start for _, stop in self._spans.get(request.request_id, ()))

    def waits(self, request: Request, start: int, bypass: str | None) -> bool:
        """Whether the request cannot be planned now: documents are missing, or it has failed.

        Args:
            start: end of its prefix hit.
            bypass: why it would run as it is.
        """
        finder = self._finders.get(request.request_id)
        if request.request_id in self._failed:
            return True
        if finder is None or bypass is not None:
            self.fail(request, f"its documents cannot be reused ({bypass or 'error'})")
            return True
        missing = finder.missing(start)
        if missing and not self.cold.wait_for(request, missing):
            self.fail(request, "its documents do not fit into the KV cache beside it")
        return bool(missing)

    def fail(self, request: Request, why: str) -> None:
        """The request ends with an error when the step is over."""
        logger.warning("segment reuse: request %s ends: %s", request.request_id, why)
        self._failed[request.request_id] = why

    def take_failed(self) -> list[str]:
        """Requests that are to be ended with an error."""
        return list(self._failed)

    def ended(self, request: Request, block_ids: Sequence[int]) -> None:
        """A request has ended.

        Args:
            block_ids: its blocks, if it was completed.
        """
        if self.cold.is_own(request.request_id):
            full = request.num_prompt_tokens // self._index.block_size
            self.cold.computed(request.request_id, block_ids[:full])
            return
        self.cold.left(request)
        kept: tuple[dict[str, Any], ...] = (self._spans, self._finders, self._failed)
        for known in (*kept, self._extra_keys):
            known.pop(request.request_id, None)

    def _alone(self, request_id: str, asker: Request, tokens: Sequence[int]) -> Request:
        """A document as a prompt of its own, in the asker's namespace."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        keys = self._extra_keys[asker.request_id]
        return Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args={EXTRA_KEYS: list(keys)},
            ),
            pooling_params=None,
            lora_request=asker.lora_request,
            cache_salt=asker.cache_salt,
            priority=asker.priority,
            block_hasher=asker._block_hasher,
        )


def private_keys() -> tuple[str, ...]:
    """Extra keys that nobody else can name."""
    return (PRIVATE, secrets.token_hex(16))
