# SPDX-License-Identifier: Apache-2.0
"""Equal segments first; similar ones for what is left."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np

from segreuse_extras.similar.canonical import Vocabulary
from segreuse_extras.similar.depth import Depths, left_contexts
from segreuse_extras.similar.fill import fill
from segreuse_extras.similar.options import ALL, SimilarityOptions
from segreuse_extras.similar.store import SimilarStore
from vllm_segreuse.cache.assembly import BLOCK
from vllm_segreuse.cache.finder import ContentFinder, Finder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Memo, Prompt
from vllm_segreuse.plan import BoolArray, Halo, Pieces


class SimilarFinder:
    """See `store` for what is searched, and when.

    Args:
        equal: finds equal segments.
        store: finds similar ones.
        index: of both.
        max_depth: deepest provenance of a donor.
        clock: seconds.
        on_search: called with the seconds each search on arrival took.

    Attributes:
        store: see above.
        halo: as its options say.
    """

    is_exact = False

    def __init__(
        self,
        equal: Finder,
        store: SimilarStore,
        index: SegmentIndex,
        max_depth: int,
        clock: Callable[[], float],
        on_search: Callable[[float], None],
    ) -> None:
        self._equal = equal
        self._index = index
        self._max_depth = max_depth
        self._clock = clock
        self._on_search = on_search
        self._ask(store)

    def _ask(self, store: SimilarStore) -> None:
        options = store.options
        self.store = store
        self.halo = Halo(options.halo_tokens, options.max_boundary_drift)
        self._min_run = options.least_run_tokens
        self._depths = None if options.w_exact is None else Depths.of(options.w_exact)

    def under(self, options: SimilarityOptions) -> SimilarFinder:
        """The same windows under other options of the search.

        Raises:
            ValueError: see `SimilarStore.under`.
        """
        other = copy.copy(self)
        other._ask(self.store.under(options))
        return other

    def without_cuts(self) -> SimilarFinder:
        """For policies whose tokens do not enter between layers."""
        if self._depths is None:
            return self
        other = copy.copy(self)
        other._depths = self._depths.without_cuts()
        return other

    def least_tokens(self, block_size: int) -> int:
        return self._equal.least_tokens(block_size)

    def prepare(self, prompt: Prompt) -> None:
        self._equal.prepare(prompt)
        began = self._clock()
        self.store.catch_up()
        prompt.slots = self.store.slots(prompt)
        self._on_search(self._clock() - began)

    def remembered(self, prompt: Prompt, start: int, stop: int) -> Matches | None:
        return self._equal.remembered(prompt, start, stop)

    def find(self, prompt: Prompt, start: int, stop: int) -> Matches:
        matches = self._equal.find(prompt, start, stop)
        if prompt.slots is None or not (prompt.slots[start:stop] >= 0).any():
            return matches
        matches = self._filled(matches, prompt, start, stop)
        if prompt.memo is not None:
            prompt.memo = Memo(prompt.memo.key, matches)
        return matches

    def plan_stop(self, matches: Matches, start: int, stop: int) -> int:
        return self._equal.plan_stop(matches, start, stop)

    def part(
        self, prompt: Prompt, matches: Matches, kept: BoolArray, start: int, stop: int
    ) -> Matches | None:
        """A similar segment is reused as a whole: it is long enough, and its halo stands for it."""
        pieces, segment = matches.pieces, matches.pieces.segment
        lost = pieces.is_similar & np.isin(segment, segment[~kept])
        return self._equal.part(prompt, matches, kept & ~lost, start, stop)

    def _filled(self, equal: Matches, prompt: Prompt, start: int, stop: int) -> Matches:
        index = self._index
        assert prompt.slots is not None
        tokens = np.require(prompt.tokens, np.int32, ("C", "W"))
        slots = np.ascontiguousarray(prompt.slots[start:stop])
        table, begins, depth = fill(
            index.nodes,
            index.tokens,
            tokens,
            slots,
            index.entries(prompt.namespace, slots // index.block_size),
            ~equal.pieces.reused(start, stop)[: slots.size],
            int(start),
            index.step,
            self._max_depth,
            self._min_run,
        )
        pieces = Pieces.from_table(table, is_similar=True, begins=begins)
        if self._depths is not None:
            entries = index.entries(prompt.namespace, np.ascontiguousarray(table[:, BLOCK]))
            contexts = left_contexts(
                index.nodes, index.tokens, tokens, table, entries, *self._depths.reach
            )
            pieces = self._depths.split(table, begins, contexts)
            # What is left of a run that was long enough may not be.
            pieces = pieces.of_segments_above(self.halo.tokens)
        return equal.merged(Matches.of(pieces, depth))


def warm_up(options: SimilarityOptions) -> None:
    """Compile, or load from the disk cache, everything a request will need."""
    index, namespaces = SegmentIndex(num_blocks=4, block_size=64), NamespaceTable()
    reached = {"min_run_tokens": 1, "halo_tokens": 0, "w_exact": {ALL: 0}}
    tiny = options.model_copy(update={"max_windows": 4, **reached})
    store = SimilarStore(index, namespaces, Vocabulary.of_identity(), tiny)
    tokens = np.arange(4 * 64, dtype=np.int32)
    blocks = np.arange(4, dtype=np.int32)
    namespace = namespaces.intern(b"")
    index.insert(namespace, blocks, tokens, first_position=0)
    index.begin_step()
    store.inserted(namespace, blocks)
    finder = SimilarFinder(
        ContentFinder(index, 0), store, index, 0, clock=lambda: 0.0, on_search=lambda _: None
    )
    prompt = Prompt(namespace, tokens[1:])
    finder.prepare(prompt)
    finder.find(prompt, 0, tokens.size - 1)
    store.removed([0])
