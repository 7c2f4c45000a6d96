# SPDX-License-Identifier: Apache-2.0
"""Maps are noted while the model computes their segments.

Of short convolutions the last inputs are kept. Layers with a state of heads scan a segment twice
more (`RecurrentLayer.note`): from no state, which leaves what the segment adds, and with values of
zero from the unit matrix or the number 1, which leaves the product. Where a segment takes several
steps, all go on from what the step before has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from segreuse_extras.states.layers import ReadTokens, SegmentMap, StateLayers, StateMap
from segreuse_extras.states.messages import Captured, CaptureOrder
from vllm_segreuse.compat.model_runner import RunningRow


@dataclass
class _Noted:
    """A segment that is being computed.

    Attributes:
        reached: of each layer, the position up to which it is noted; None: not begun, or lost.
        maps: of each layer, of what is noted.
    """

    order: CaptureOrder
    reached: list[int | None]
    maps: list[StateMap | None] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return all(reached == self.order.stop for reached in self.reached)

    def has_begun(self) -> bool:
        return any(of_layer is not None for of_layer in self.maps)

    def is_torn(self) -> bool:
        """Whether tokens are missing: none of the layers has seen them, or one by one as vLLM's
        decodes."""
        return None in self.reached or len({*self.reached}) > 1

    def is_finite(self) -> bool:
        return all(
            bool(part.isfinite().all()) for it in self.maps if it is not None for part in it.parts
        )


class Captures:
    """Of one worker.

    Args:
        layers: the model's.
        rows: of the step that vLLM's forward computes.

    Attributes:
        maps: that are complete, by segment.
    """

    def __init__(self, layers: StateLayers, rows: Callable[[], list[RunningRow]]) -> None:
        self._layers = layers
        self._rows_of_step = rows
        self._own_rows: list[RunningRow] | None = None
        self._rests = False
        self._under_way: dict[int, _Noted] = {}
        self.maps: dict[int, SegmentMap] = {}

    def order(self, orders: Sequence[CaptureOrder]) -> None:
        """Note these from here on."""
        count = len(self._layers.layers)
        for order in orders:
            self._under_way[order.segment] = _Noted(order, [None] * count, [None] * count)

    def drop(self, segments: Sequence[int]) -> None:
        """Forget maps, also unfinished ones."""
        for segment in segments:
            self._under_way.pop(segment, None)
            self.maps.pop(segment, None)

    def take(self) -> Captured | None:
        """What came of them in this step; None: nothing."""
        over = [it for it in self._under_way.values() if it.is_complete]
        done = [it for it in over if it.is_finite()]
        lost = [it for it in self._under_way.values() if it.has_begun() and it.is_torn()]
        lost += [it for it in over if not it.is_finite()]
        for it in done:
            kept = [of_layer.compact() for of_layer in it.maps if of_layer is not None]
            self.maps[it.order.segment] = kept
        for it in (*done, *lost):
            del self._under_way[it.order.segment]
        if not done and not lost:
            return None
        return Captured(
            tuple(it.order.segment for it in done), tuple(it.order.segment for it in lost)
        )

    @contextmanager
    def computing(self, request_id: str, position: int, count: int) -> Iterator[None]:
        """Meanwhile the model computes tokens of one request, in no step of vLLM's."""
        self._own_rows = [RunningRow(request_id, 0, count, position)]
        try:
            yield
        finally:
            self._own_rows = None

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Meanwhile nothing is noted: it was, or vLLM's forward computes it once more."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def observe(self, seen: ReadTokens) -> None:
        """A layer is about to read tokens."""
        if self._rests or not self._under_way:
            return
        layer = self._layers.index[seen.layer]
        found = self._rows_of_step() if self._own_rows is None else self._own_rows
        rows = {row.request_id: row for row in found}
        for it in self._under_way.values():
            row = rows.get(it.order.request_id)
            if row is not None and row.first >= seen.num_decoded:
                self._note(it, layer, seen, row)

    def _note(self, it: _Noted, layer: int, seen: ReadTokens, row: RunningRow) -> None:
        """What a layer's tokens tell of a segment."""
        order = it.order
        first = max(order.first, row.position)
        stop = min(order.stop, row.position + row.length)
        if first >= stop:
            return
        if first == order.first:  # also once more, after a preemption
            it.maps[layer] = self._layers.layers[layer].nothing()
        elif first != it.reached[layer]:
            it.reached[layer] = None
            return
        known = it.maps[layer]
        assert known is not None
        begin, end = (row.first + position - row.position for position in (first, stop))
        it.maps[layer] = self._layers.layers[layer].note(known, seen, begin, end)
        it.reached[layer] = stop
