# SPDX-License-Identifier: Apache-2.0
"""Layers with a state of heads beside their last inputs: a segment is an affine map of it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from segreuse_extras.states.layers import Observer, ReadTokens, StateLayer, StateMap
from vllm_segreuse.compat import gdn_attention
from vllm_segreuse.compat.gdn_attention import Scan

_KEPT = torch.bfloat16
"""The type of what is kept of a map."""


@dataclass(frozen=True)
class AffineMap(StateMap):
    """`S_out = product S_in + added`.

    Attributes:
        product: `[heads, channels, channels]`, the matrix of each head; or `[heads, 1, 1]`, where
            that is a number times the unit matrix.
        added: as a state: `[heads, channels, other channels]`.
    """

    product: torch.Tensor
    added: torch.Tensor

    @property
    def is_by_numbers(self) -> bool:
        """Whether a head has a number for a matrix."""
        return self.product.shape[1:] == (1, 1)

    def compact(self) -> Self:
        """In bfloat16: that rounds less than the kernel does by itself. Single numbers take no
        room, and stay."""
        product = self.product.clone() if self.is_by_numbers else self.product.to(_KEPT)
        return type(self)(self.tail.clone(), product, self.added.to(_KEPT))


class RecurrentLayer(StateLayer):
    """Of a kind whose kernel can be run once more, with other states and values.

    Its states are `[blocks, heads, channels, other channels]`.
    """

    keeps: ClassVar[tuple[str, ...]] = (*StateLayer.keeps, "state")

    def __init__(self, name: str, group: int, layer: Any) -> None:
        super().__init__(name, group, layer)
        self._states = self._kept[1]
        self.check(name, self._states)

    @classmethod
    @abstractmethod
    def check(cls, name: str, states: torch.Tensor) -> None:
        """Refuse states of another kind.

        Raises:
            UnsupportedModelError: naming the layer.
        """

    @abstractmethod
    def unit(self) -> torch.Tensor:
        """The product of no tokens, float32; a tensor of its own."""

    @abstractmethod
    def scan_again(self, scan: Scan, part: slice, state: torch.Tensor, valued: bool) -> None:
        """Run vLLM's kernel once more on some of the tokens that a step prefills.

        Args:
            scan: of the step.
            part: which of these tokens.
            state: float32, added to or, without values, multiplied; it is changed in place.
            valued: with the tokens' values, or with zeros.
        """

    def observed_by(self, observer: Observer | None) -> None:
        """See there; kernels are observed, those of all such layers at once."""
        gdn_attention.observe(observer)

    def round(self, block: int) -> None:
        """See there."""
        self._states[block] = self._states[block].to(_KEPT)

    def nothing(self) -> AffineMap:
        """See there."""
        added = torch.zeros_like(self._states[0], dtype=torch.float32)
        return AffineMap(super().nothing().tail, self.unit(), added)

    def note(self, known: StateMap, seen: ReadTokens, first: int, stop: int) -> StateMap:
        """See there."""
        assert isinstance(known, AffineMap)
        assert isinstance(seen, Scan)
        part = slice(first - seen.num_decoded, stop - seen.num_decoded)
        self.scan_again(seen, part, known.product, valued=False)
        self.scan_again(seen, part, known.added, valued=True)
        return super().note(known, seen, first, stop)

    def compose(self, block: int, segment: StateMap) -> None:
        """See there."""
        assert isinstance(segment, AffineMap)
        super().compose(block, segment)
        state, product, added = self._states[block], segment.product.float(), segment.added.float()
        if segment.is_by_numbers:
            state.copy_(torch.addcmul(added, product, state.float()))
        else:
            state.copy_(torch.baddbmm(added, product, state.float()))
