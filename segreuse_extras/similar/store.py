# SPDX-License-Identifier: Apache-2.0
"""The similarity index of one engine: fed by what donates, asked when a request arrives.

Both take place outside of `schedule()`: what the segment index reports there is only listed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from segreuse_extras.similar.align import donor_slots
from segreuse_extras.similar.canonical import Vocabulary
from segreuse_extras.similar.minhash import Permutations, bands_for, shingles
from segreuse_extras.similar.options import SimilarityOptions
from segreuse_extras.similar.windows import Marks, Windows
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.cache.prompt import Prompt
from vllm_segreuse.plan import IntArray
from vllm_segreuse.scheduling.donors import Follower

CONTEXT_PLACES = 32
"""Places of the signature of what is in front of a window."""

PROBES_PER_STRIDE = 4
"""Windows of a prompt to one of a donor: they meet wherever the text is."""

ALIGNED = 2
"""Candidates that are aligned with each stretch of a stride's length."""

SEARCHES = (
    *("by_default", "threshold", "min_run_tokens", "min_context_tokens"),
    *("halo_tokens", "max_boundary_drift", "w_exact"),
)
"""Options that windows do not depend on."""

_LISTED = 4096
_LONGEST = 2  # tokens of a window to one class that it is compared by


class Units(NamedTuple):
    """Windows of a text and its segments; int32 `[n]` each, in canonical classes."""

    begins: IntArray
    ends: IntArray


class SimilarStore(Follower):
    """One per engine.

    Args:
        index: what donates.
        namespaces: of the ids in the index.
        vocabulary: what tokens are compared by.
        options: see there.

    Attributes:
        windows: that are indexed.
        options: see above.
    """

    def __init__(
        self,
        index: SegmentIndex,
        namespaces: NamespaceTable,
        vocabulary: Vocabulary,
        options: SimilarityOptions,
    ) -> None:
        self._index = index
        self._namespaces = namespaces
        self._vocabulary = vocabulary
        self.options = self._first_options = options
        self._permutations = Permutations(options.permutations)
        self._context = Permutations(CONTEXT_PLACES)
        self.windows = Windows(
            index.num_blocks,
            options.max_windows,
            options.permutations,
            CONTEXT_PLACES,
            bands_for(options.threshold, options.permutations),
        )
        self._listed: deque[tuple[int, IntArray]] = deque(maxlen=_LISTED)

    def under(self, options: SimilarityOptions) -> SimilarStore:
        """The same windows, searched under other options.

        Raises:
            ValueError: the windows would be others, or less similar ones be asked for than the
                buckets are made for.
        """
        first = self._first_options
        kept = {name: getattr(first, name) for name in SEARCHES}
        if options.model_copy(update=kept) != first:
            raise ValueError(f"only {', '.join(SEARCHES)} can change")
        if options.threshold < first.threshold:
            raise ValueError(f"threshold={options.threshold} must be at least {first.threshold}")
        other = copy.copy(self)
        other.options = options
        return other

    # What the segment index reports.

    def inserted(self, namespace: int, block_ids: IntArray) -> None:
        """Blocks may donate from the next step on."""
        self._listed.append((namespace, block_ids))

    def removed(self, block_ids: Sequence[int]) -> None:
        """Blocks were evicted."""
        for block_id in block_ids:
            self.windows.remove(block_id)

    def cleared(self) -> None:
        """All blocks were."""
        self._listed.clear()
        self.windows.clear()

    # Outside of `schedule()`.

    def catch_up(self) -> None:
        """Index the windows of the blocks that were listed.

        A block that is gone by now is not in the segment index, and one that holds other tokens is
        there with these: nothing but what the index says is read.
        """
        listed = list(self._listed)
        self._listed.clear()
        if not listed:
            return
        blocks = np.concatenate([block_ids for _, block_ids in listed])
        owners = np.repeat([namespace for namespace, _ in listed], [it.size for _, it in listed])
        for namespace in np.unique(owners).tolist():
            mine = blocks[owners == namespace]
            entries = self._index.entries(namespace, mine)
            mine, entries = mine[entries >= 0], entries[entries >= 0]
            follows = self._index.nodes["parent"][entries[1:]] == entries[:-1]
            for run in np.split(np.arange(mine.size), np.flatnonzero(~follows) + 1):
                if run.size:
                    self._index_run(namespace, mine[run], entries[run])

    def slots(self, prompt: Prompt) -> IntArray:
        """Slots of tokens that are equal to those of a prompt, from similar text; int32 `[n]`.

        A slot is a block's id times the tokens of a block, plus an offset; -1: nothing was found.
        Nothing is promised of a slot: who uses it compares the tokens.
        """
        index, options = self._index, self.options
        tokens = np.require(prompt.tokens, np.int32, ("C", "W"))
        ids, first = self._vocabulary.canonical(tokens)
        stride = max(1, options.stride_tokens // PROBES_PER_STRIDE)
        ends = np.append(np.arange(stride, ids.size, stride), ids.size).astype(np.int32)
        units = self._with_segments(ids, ends, 0)
        digest = self._namespaces.digest(prompt.namespace)
        found = self.windows.look_up(digest, self._marks(ids, units), options.threshold)
        begins, ends = _positions(first, tokens.size, units)
        best = self._best(found, ends)
        entries = index.entries(prompt.namespace, self.windows.block[best[:, 1]])
        margin = options.stride_tokens + options.min_context_tokens
        candidates = np.stack(
            (
                np.maximum(begins[best[:, 0]] - margin, 0),
                np.minimum(ends[best[:, 0]] + options.stride_tokens, tokens.size),
                entries,
                self.windows.length[best[:, 1]] + margin,
            ),
            axis=1,
        ).astype(np.int32)
        return donor_slots(
            index.nodes,
            index.tokens,
            tokens,
            np.ascontiguousarray(candidates[entries >= 0]),
            options.min_run_tokens,
            options.min_context_tokens,
        )

    def _index_run(self, namespace: int, blocks: IntArray, entries: IntArray) -> None:
        """Windows that end in consecutive blocks of one sequence."""
        index, options, size = self._index, self.options, self._index.block_size
        reach = _LONGEST * (options.window_tokens + options.context_tokens)
        before = index.ancestors(int(entries[0]), -(-reach // size))
        text = index.tokens[np.concatenate((before, blocks))].reshape(-1)
        begin, stride = before.size * size, options.stride_tokens
        ids, first = self._vocabulary.canonical(text)
        # At multiples of the stride in the sequence, within these blocks.
        position = int(index.nodes["position"][entries[0]]) - begin
        wanted = np.arange(begin + stride - (position + begin) % stride, text.size + 1, stride)
        units = self._with_segments(
            ids, np.searchsorted(first, wanted).astype(np.int32), begin, first
        )
        begins, ends = _positions(first, text.size, units)
        homes = np.clip((ends - 1) // size - before.size, 0, blocks.size - 1)
        lengths = (homes + before.size + 1) * size - begins
        self.windows.insert(
            self._namespaces.digest(namespace),
            self._marks(ids, units),
            np.ascontiguousarray(blocks[homes]),
            lengths.astype(np.int32),
        )

    def _with_segments(
        self, ids: IntArray, ends: IntArray, begin: int, first: IntArray | None = None
    ) -> Units:
        """Windows that end at `ends`, and the segments between anchors.

        Args:
            begin: segments count that end with an anchor at this token or behind it.
            first: positions of the classes; None: all segments count.
        """
        window, least = self.options.window_tokens, self.options.least_window_tokens
        anchors = self._anchors(ids)
        before = np.concatenate(([-window], anchors[:-1])) if anchors.size else anchors
        if first is not None:
            before, anchors = before[first[anchors] >= begin], anchors[first[anchors] >= begin]
        starts = np.maximum(
            np.concatenate((ends - window, np.maximum(before, anchors - window))), 0
        )
        stops = np.concatenate((ends, anchors))
        kept = stops - starts >= least
        return Units(starts[kept].astype(np.int32), stops[kept].astype(np.int32))

    def _anchors(self, ids: IntArray) -> IntArray:
        """Where any of the texts begins at which a segment does, ascending."""
        found = np.zeros(ids.size, np.bool_)
        for anchor in self._vocabulary.anchors:
            count = max(0, ids.size - anchor.size + 1)
            here = np.ones(count, np.bool_)
            for i, wanted in enumerate(anchor):
                here &= ids[i : i + count] == wanted
            found[:count] |= here
        return np.flatnonzero(found).astype(np.int32)

    def _marks(self, ids: IntArray, units: Units) -> Marks:
        """Signatures of units, and of what is in front of each."""
        width = self.options.shingle_tokens
        hashes = shingles(ids, width)
        text = self._permutations.signatures(hashes, units.begins, units.ends - width + 1)
        fronts = np.maximum(units.begins - self.options.context_tokens, 0)
        stops = np.maximum(units.begins - width + 1, fronts)
        return Marks(text, self._context.signatures(hashes, fronts, stops))

    def _best(self, found: IntArray, ends: IntArray) -> IntArray:
        """Rows of the candidates to be aligned, the `ALIGNED` best of each stretch of the prompt.

        How similar text and left context are counts alike.
        """
        rank = found[:, 2] / self.options.permutations + found[:, 3] / CONTEXT_PLACES
        stretch = ends[found[:, 0]] // self.options.stride_tokens
        order = np.lexsort((-rank, stretch))
        pairs = stretch.astype(np.int64) * self.windows.block.size + found[:, 1]
        _, firsts = np.unique(pairs[order], return_index=True)
        order = order[np.sort(firsts)]  # the best of each donor in each stretch
        firsts = np.searchsorted(stretch[order], stretch[order])
        best: IntArray = found[order[np.arange(order.size) - firsts < ALIGNED]]
        return best


def _positions(first: IntArray, num_tokens: int, units: Units) -> tuple[IntArray, IntArray]:
    """Begin and end of units in tokens."""
    bounds = np.append(first, num_tokens)
    return bounds[units.begins], bounds[units.ends]
