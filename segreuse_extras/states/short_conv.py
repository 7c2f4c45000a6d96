# SPDX-License-Identifier: Apache-2.0
"""Short convolutions and nothing else (LFM2): the last inputs of a segment are all of its map.

With a convolution over three tokens, the first two of a segment are the only ones to which it
matters what stood in front; what is behind a segment sees its last two. So nothing is multiplied,
and a map takes as much as what vLLM keeps of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from segreuse_extras.states.layers import Observer, StateLayer


@dataclass(frozen=True)
class Entered:
    """See `ReadTokens`; a single token is seen as others are."""

    layer: str
    inputs: torch.Tensor
    num_decoded: int = 0


class ShortConvLayer(StateLayer):
    """One of vLLM's `ShortConv`."""

    unstudied: ClassVar[str | None] = "with short convolutions"

    def __init__(self, name: str, group: int, layer: Any) -> None:
        super().__init__(name, group, layer)
        self._projection: torch.nn.Module = layer.in_proj
        self._hook: Any = None

    def round(self, block: int) -> None:
        """See there: nothing of a map is rounded."""

    def observed_by(self, observer: Observer | None) -> None:
        """See there.

        Torch shows what the layer's projection leaves: two gates, `B` and `C`, and `x`. `B x` is
        what vLLM convolves. Start-up's proof would notice if it were something else.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if observer is None:
            return

        def show(module: torch.nn.Module, given: Any, left: tuple[torch.Tensor, Any]) -> None:
            gate, _, entering = left[0].chunk(3, dim=-1)
            observer(Entered(self.name, gate * entering))

        self._hook = self._projection.register_forward_hook(show)
