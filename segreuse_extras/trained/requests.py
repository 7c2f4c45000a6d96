# SPDX-License-Identifier: Apache-2.0
"""Requests to a model that was trained on documents computed alone.

For such a model, KV of a document that was computed in its place is wrong. So a request with
documents is planned once all of them are there, waits while they are computed, or ends with an
error; it never runs as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from segreuse_extras.trained.cold_documents import ColdDocuments
from segreuse_extras.trained.finder import IsolatedDocument, IsolatedFinder
from segreuse_extras.trained.layout import Layout, LayoutError, Span, blocks_needed, padded
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.engine.kv_slots import KvSlots
from vllm_segreuse.features.knowledge.frozen import FrozenPool
from vllm_segreuse.options.parsing import EXTRA_KEYS
from vllm_segreuse.plan import BoolArray, IntArray, Recipe, Segments
from vllm_segreuse.scheduling.tracked import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.segreuse")

PRIVATE = "segreuse-private"
"""First of the extra keys of a request that has none."""


def recipe(reused: BoolArray, segments: Segments) -> Recipe:
    """Link tokens and new text are computed, and nothing of a document."""
    return Recipe.without_choice(~reused)


@dataclass
class _Asked:
    """A request with documents.

    Attributes:
        request: vLLM's.
        spans: its documents.
        extra_keys, namespace: of its documents; the id is used as long as the request has it.
        key: of the namespace.
        finder: of them; None: it has not been made.
        failed: why the request ends; None: it does not.
    """

    request: Request
    spans: Sequence[Span]
    extra_keys: tuple[str, ...] = ()
    namespace: int = -1
    key: bytes = b""
    finder: IsolatedFinder | None = None
    failed: str | None = None


class IsolatedRequests:
    """Those of one engine.

    Args:
        layout: of prompts.
        pool: vLLM's blocks.
        index: which blocks a namespace knows.
        entries: compressed documents.
        slots: that vLLM takes for requests.
        capacity: blocks that requests can have.
    """

    def __init__(
        self,
        layout: Layout,
        pool: SegmentBlockPool,
        index: SegmentIndex,
        entries: FrozenPool,
        slots: KvSlots,
        capacity: int,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._index = index
        self._entries = entries
        self._slots = slots
        self._asked: dict[str, _Asked] = {}
        self.cold: ColdDocuments[Request] = ColdDocuments(pool, capacity, self._alone)

    @property
    def compressed(self) -> bool:
        """Whether all documents are: anchors stand for them, and knowledge bases make these."""
        return self._layout.anchors is not None

    @property
    def asking(self) -> frozenset[str]:
        """Requests with documents that have not ended, by id."""
        return frozenset(self._asked)

    def extra_keys(self, request_id: str) -> tuple[str, ...]:
        """Those of the documents of one of them; none before it has got its finder."""
        return self._asked[request_id].extra_keys

    def has_documents(self, request_id: str) -> bool:
        """Whether a request that has not ended has documents."""
        return request_id in self._asked

    def arrived(self, request: Request) -> bool:
        """Whether a request has documents."""
        if self.cold.is_own(request.request_id):
            return False
        failed = None
        try:
            spans = self._layout.spans(request.prompt_token_ids or ())
        except LayoutError as error:
            spans = (Span(0, request.num_prompt_tokens),)  # of which nothing is known to be right
            failed = str(error)
        if request.resumable:
            spans = (Span(0, request.num_prompt_tokens),)
            failed = "its prompt comes in parts, and documents of later ones cannot be seen"
        if spans:
            self._asked[request.request_id] = _Asked(request, spans)
        if failed is not None:
            self.fail(request, failed)
        return bool(spans)

    def finder(
        self, request: Request, extra_keys: tuple[str, ...], namespace: int, key: bytes
    ) -> IsolatedFinder:
        """Of the documents of a request that has arrived.

        Args:
            namespace, key: of the request.
        """
        asked = self._asked[request.request_id]
        asked.extra_keys, asked.namespace, asked.key = extra_keys, namespace, key
        size, tokens = self._index.block_size, request.prompt_token_ids or ()
        documents = []
        for start, stop in asked.spans:
            alone = padded(tokens[start:stop], size)
            if len(alone) >= self._slots.max_tokens:
                self.fail(request, f"a document of {stop - start} tokens is too long")
            resident = self._resident(asked, alone)
            documents.append(IsolatedDocument(start, stop, alone, resident))
        asked.finder = IsolatedFinder(documents, size)
        return asked.finder

    def name(self, tracked: TrackedRequest, request: Request, names: Sequence[str]) -> None:
        """A request with compressed documents has arrived; it names their entries, in order."""
        asked, size = self._asked[request.request_id], self._index.block_size
        if len(names) != len(asked.spans):
            self.fail(request, f"it has {len(asked.spans)} documents, and names {len(names)}")
        documents = [
            IsolatedDocument(start, stop, (), self._frozen(tracked, name, start, stop))
            for name, (start, stop) in zip(names, asked.spans, strict=False)
        ]
        asked.finder = IsolatedFinder(documents, size)
        tracked.method = replace(tracked.method, finder=asked.finder)
        # Anchors of all documents look alike: what is behind them has no name.
        tracked.stands_for_others(asked.spans[0].start, size)

    def _frozen(
        self, tracked: TrackedRequest, name: str, start: int, stop: int
    ) -> Callable[[], IntArray | None]:
        tokens, namespace = tracked.prompt.tokens[start:stop], tracked.prompt.namespace

        def resident() -> IntArray | None:
            parts = self._entries.compressed(name, namespace) or ()
            if len(parts) != 1 or tokens.tolist() != np.asarray(parts[0].tokens).tolist():
                return None
            return np.asarray(parts[0].block_ids, np.int32)

        return resident

    def _resident(self, asked: _Asked, tokens: tuple[int, ...]) -> Callable[[], IntArray | None]:
        alone = self._alone("", asked.request, tokens)
        count = len(alone.block_hashes)

        def resident() -> IntArray | None:
            held = self.cold.held(asked.request.request_id, tokens)
            if held is not None:  # the index may know these in no further namespace
                return held
            blocks = self._pool.resident_blocks(alone, 0, count)
            is_known = (blocks >= 0).all() and not self._index.missing(asked.namespace, blocks).size
            return blocks if is_known else None

        return resident

    def needs_plan(self, request: Request, start: int) -> bool:
        """Whether a document of the request lies behind its prefix hit, or the request failed."""
        asked = self._asked.get(request.request_id)
        return asked is not None and any(stop > start for _, stop in asked.spans)

    def waits(self, request: Request, start: int, bypass: str | None) -> bool:
        """Whether the request cannot be planned now: documents are missing, or it has failed.

        Args:
            start: end of its prefix hit.
            bypass: why it would run as it is.
        """
        asked = self._asked[request.request_id]
        if asked.failed is not None:
            return True
        finder = asked.finder
        if finder is None or bypass is not None:
            self.fail(request, f"its documents cannot be reused ({bypass or 'error'})")
            return True
        if not finder.missing(start):
            return False
        if self.compressed:
            self.fail(request, "a compressed document that it names is not in the cache")
            return True
        tokens, size = request.prompt_token_ids or (), self._index.block_size
        num_slots = self._slots.needed(request.num_tokens)
        needed = blocks_needed(tokens, asked.spans, size, num_slots)
        name, documents = request.request_id, finder.behind(start)
        if not self.cold.wait_for(name, request, asked.key, documents, needed):
            self.fail(request, "its documents do not fit into the KV cache beside it")
        return True

    def fail(self, request: Request, why: str) -> None:
        """The request ends with an error when the step is over."""
        logger.warning("segment reuse: request %s ends: %s", request.request_id, why)
        self._asked[request.request_id].failed = why

    def take_failed(self) -> list[str]:
        """Requests that are to be ended with an error."""
        return [name for name, asked in self._asked.items() if asked.failed is not None]

    def ended(self, request: Request, block_ids: Sequence[int]) -> None:
        """A request has ended.

        Args:
            block_ids: its blocks, if it was completed.
        """
        if self.cold.is_own(request.request_id):
            full = request.num_prompt_tokens // self._index.block_size
            self.cold.computed(request.request_id, block_ids[:full])
            return
        self.cold.left(request.request_id)
        self._asked.pop(request.request_id, None)

    def _alone(self, request_id: str, asker: Request, tokens: Sequence[int]) -> Request:
        """A document as a prompt of its own, in the asker's namespace."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        keys = self._asked[asker.request_id].extra_keys
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
            arrival_time=asker.arrival_time,
            priority=asker.priority,
            block_hasher=asker._block_hasher,
        )


def private_keys() -> tuple[str, ...]:
    """Extra keys that nobody else can name."""
    return (PRIVATE, secrets.token_hex(16))


def is_private(extra_keys: Sequence[str]) -> bool:
    """Whether these are such keys: nobody looks for what is computed under them."""
    return extra_keys[0] == PRIVATE
