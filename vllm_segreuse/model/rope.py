# SPDX-License-Identifier: Apache-2.0
"""Delta-RoPE: move a cached key from one position to another (SparseX, section 3.1).

RoPE rotates channel pair i of a key at position p by `p * w_i`; moving it to `p + delta` rotates it
by `delta * w_i` more. The frequencies are read from the layer's own rotary module, so that every
scaling that is linear in the position (linear, NTK, YaRN, llama3) comes out right. YaRN also scales
the magnitude of the key; the cached key has that already, so the rotation here is a pure one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.pages import Rotation
from vllm_segreuse.model.rotary import Rotary, read


class RopeError(RuntimeError):
    """A layer's rotary embedding is not a rotation by the position difference."""


@dataclass(frozen=True)
class DeltaRope:
    """Rotation by a position difference.

    Attributes:
        frequencies: radians per position of each channel pair, float64 `[rotary_dim / 2]`.
        rotary_dim: leading channels of a head that are rotated; the rest pass through.
        neox: pairs are `(i, i + rotary_dim/2)` if true, `(2i, 2i+1)` otherwise.
    """

    frequencies: torch.Tensor
    rotary_dim: int
    neox: bool

    @property
    def rotation(self) -> Rotation:
        """The channels that turn, as the kernels take them."""
        return Rotation(self.rotary_dim, self.neox)

    def tables(self, deltas: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of rotations, float32 `[deltas, rotary_dim / 2]`.

        Args:
            deltas: new position minus donor position, int64 `[deltas]`.
        """
        # In float64, since delta * w exceeds what float32 resolves for long prompts.
        angles = deltas.double()[:, None] * self.frequencies.to(deltas.device)[None]
        return angles.cos().float(), angles.sin().float()

    def rotate(self, keys: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        """Keys `[tokens, heads, head_size]`, each moved by its own delta; in float32, rounded once
        to the keys' dtype."""
        return reference.rotate(keys, self.rotation, *self.tables(deltas))

    def same_as(self, other: DeltaRope) -> bool:
        """Whether two layers may share their tables."""
        return (
            self.rotary_dim == other.rotary_dim
            and self.neox == other.neox
            and torch.equal(self.frequencies, other.frequencies)
        )


def derive(rotary: torch.nn.Module, name: str) -> DeltaRope:
    """Read the frequencies of a vLLM rotary module and prove that they reproduce it.

    Args:
        rotary: one of `rotary.MODULES`.
        name: layer name for error texts.

    Raises:
        RopeError: if the module is not a rotation by an angle linear in the position.
    """
    try:
        known, rotary_dim = read(rotary), int(rotary.rotary_dim)
        frequencies = _frequencies(known.table)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise RopeError(
            f"{name}: {type(rotary).__name__} gives no table of angles ({error})"
        ) from error
    if frequencies.shape != (rotary_dim // 2,):
        raise RopeError(
            f"{name}: {type(rotary).__name__} has {frequencies.numel()} angles "
            f"for {rotary_dim} channels"
        )
    delta_rope = DeltaRope(frequencies, rotary_dim, known.neox)
    _prove(rotary, known, delta_rope, name)
    return delta_rope


def of_transformers(model: torch.nn.Module) -> list[DeltaRope]:
    """Rotations that a model of the Transformers backend may have.

    Its rotary modules stand beside the decoder layers and return cosines and sines, by which each
    layer rotates its keys itself. Their frequencies are buffers (`inv_freq`, or one of each kind of
    layer); which of them, and which pairs of channels turn, is for the layer's keys to tell.

    Args:
        model: as loaded.
    """
    found: list[DeltaRope] = []
    for name, buffer in model.named_buffers():
        if not name.endswith("inv_freq") or buffer.ndim != 1:
            continue
        for neox in (True, False):
            rope = DeltaRope(buffer.detach().to("cpu", torch.float64), 2 * buffer.numel(), neox)
            if not any(rope.same_as(other) for other in found):
                found.append(rope)
    return found


def _frequencies(table: torch.Tensor) -> torch.Tensor:
    """Radians per position of each channel pair, float64, from cosines and sines by position.

    A row p gives the frequency up to its rounding error / p, and up to whole turns, which the rows
    before it settle. At powers of two the angle itself is exact in float32. The first row alone
    would not do: its error of 4e-8 is one of 5e-3 radians for a key that moves by 100,000.
    """
    frequencies = torch.zeros(table.shape[1] // 2, dtype=torch.float64)
    position = 1
    while position < table.shape[0]:
        cos, sin = table[position].double().chunk(2)
        error = torch.atan2(sin, cos) - position * frequencies
        frequencies += (error - (error / math.tau).round() * math.tau) / position
        position *= 2
    return frequencies


def _prove(rotary: torch.nn.Module, known: Rotary, delta_rope: DeltaRope, name: str) -> None:
    """Rotate random keys with the module itself at two positions; our delta must map one to the
    other."""
    generator = torch.Generator().manual_seed(0)
    limit = known.table.shape[0] - 1
    old = torch.tensor([0, 1, 7, limit // 3, limit, limit // 2])
    new = torch.tensor([limit, 0, 7, limit // 2 + 1, limit // 5, 3])
    keys = torch.randn(len(old), 2 * rotary.head_size, generator=generator)
    try:
        at_old, at_new = known.rotate(old, keys), known.rotate(new, keys)
    except Exception as error:
        raise RopeError(f"{name}: {type(rotary).__name__} cannot be called ({error})") from error
    shape = (len(old), 2, rotary.head_size)
    moved = delta_rope.rotate(at_old.view(shape), new - old)
    # The module multiplies position by frequency in float32: its own angle error grows with both.
    angle_error = (old.maximum(new) * delta_rope.frequencies.abs().max()).float() * 2.0**-22
    tolerance = (1e-5 + 4 * angle_error)[:, None, None] * at_new.view(shape).abs().amax()
    worst = ((moved - at_new.view(shape)).abs() - tolerance).max().item()
    if not worst <= 0:
        raise RopeError(
            f"{name}: {type(rotary).__name__} is not a rotation by the position difference "
            f"(off by {worst:.2g} beyond rounding)"
        )
