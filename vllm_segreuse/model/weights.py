# SPDX-License-Identifier: Apache-2.0
"""Whether a model still has the weights that it was loaded with, to the last bit.

vLLM resets its prefix cache for sleep and for new weights as it does on request, and does not say
why. Sleep of level 1 and a reset change no weight. So the answer is looked for in the weights
themselves: a sum over all parameters and buffers, each 8 bytes times an odd number that depends on
their place, modulo 2**64. A change of one value always changes it, others do but for one in 2**64.
"""

from __future__ import annotations

import torch

_CHUNK = 1 << 20
_FACTOR = 6364136223846793005  # of Knuth's MMIX generator: odd, and large
_WORD_BYTES = 8


def weights_digest(model: torch.nn.Module) -> int:
    """A number of 64 bits for the weights of a model. It reads all of them once.

    Args:
        model: whose weights are on one device.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    total: torch.Tensor | None = None
    places: torch.Tensor | None = None
    for _, tensor in sorted(named, key=lambda pair: pair[0]):
        words = _words(tensor.detach())
        if places is None or places.device != words.device:
            places = 2 * torch.arange(_CHUNK, device=words.device) * _FACTOR + 1
        if total is None:
            total = torch.zeros((), dtype=torch.int64, device=words.device)
        for chunk in words.split(_CHUNK):
            found = (chunk * places[: len(chunk)]).sum()
            total = total * _FACTOR + found.to(total.device)
        total = total * _FACTOR + tensor.numel()
    return 0 if total is None else int(total.item())


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as int64 `[n]`; zeros fill the last one."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    rest = -len(data) % _WORD_BYTES
    if rest or data.storage_offset() % _WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, rest))
    return data.view(torch.int64)


class ModelWeights:
    """Of the model of one worker; made before anything can change them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._digest = weights_digest(model)

    def are_unchanged(self) -> bool:
        """Whether all are as they were. It waits for the device."""
        return weights_digest(self._model) == self._digest
