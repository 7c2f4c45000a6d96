# SPDX-License-Identifier: Apache-2.0
"""By which rotation each layer's keys carry their position, and that its values carry none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from vllm_segreuse.model import rope, token_kv
from vllm_segreuse.model.modules import UnsupportedModelError, in_the_place_of
from vllm_segreuse.model.rope import DeltaRope, RopeError
from vllm_segreuse.model.rotary import MODULES
from vllm_segreuse.prefill.proofs.scratch import Scratch, changed_outputs

_SAME_DIRECTION = 0.999
"""Cosine of two heads of which one is the other, scaled and rounded."""


class RotatingLayers(Protocol):
    """Decoder layers, and the attention of each."""

    layers: list[nn.Module]
    attention: list[nn.Module]


def check_rotated_channels(stack: RotatingLayers) -> None:
    """Rotary modules must be given whole heads: `DeltaRope` turns the first channels of a key.

    Raises:
        UnsupportedModelError: naming the first layer that rotates a part of its keys by itself.
    """
    for layer, attention in zip(stack.layers, stack.attention, strict=True):
        if token_kv.is_latent(attention):
            continue
        for module in layer.modules():
            if isinstance(module, MODULES) and module.head_size != attention.head_size:
                raise UnsupportedModelError(
                    f"{attention.layer_name} rotates {module.head_size} of a key's "
                    f"{attention.head_size} channels apart from the others"
                )


@torch.inference_mode()
def prove_rotations(
    scratch: Scratch, alternatives: Sequence[DeltaRope] = ()
) -> list[DeltaRope | None]:
    """Rotation of each layer, None where keys carry no position (NoPE).

    A layer's rotation is derived from the rotary module whose output is the key it caches. It
    is then proven on the model: with all positions moved by the same distance, attention sees
    the same relative positions, so every layer must cache the same keys, rotated by that
    distance. Moved once more, with each layer's output as it was, every layer must cache the very
    same values. Leaves the tokens' KV at their own positions in the first scratch blocks.

    Args:
        scratch: random tokens.
        alternatives: rotations of which a layer has the one that turns its keys as the model does,
            or none, where no module returns the key; that is proven at the last positions, too.
    """
    outputs: dict[nn.Module, Any] = {}

    def keep(module: nn.Module, output: Any) -> None:
        outputs[module] = _copy(output)

    stack = scratch.stack
    modules = *stack.layers, *stack.attention  # a draft has one layer here, whatever it holds
    farthest = scratch.max_model_len - scratch.count
    with scratch.unrounded():
        with changed_outputs(modules, keep):
            own = _given(scratch, 0)
        moved = _given(scratch, scratch.distance)
        with changed_outputs(modules, lambda module, _: _copy(outputs[module])):
            alone = _given(scratch, scratch.distance)
            far = _given(scratch, farthest) if alternatives else alone
    scratch.forward()
    ropes: list[DeltaRope | None] = []
    given = zip(stack.attention, own, moved, far, alone, strict=True)
    for layer, here, there, at_end, kept in given:
        delta_rope: DeltaRope | None
        if here.rotary is not None:
            delta_rope = rope.derive(here.rotary, layer.layer_name)
        else:
            delta_rope = _best(layer, here.key, there.key, alternatives, scratch.distance)
        prove_rotation(layer, here.key, there.key, delta_rope, scratch.distance)
        if alternatives:
            # The model multiplies positions by frequencies in float32.
            prove_rotation(layer, here.key, at_end.key, delta_rope, farthest, farthest * 2.0**-22)
        prove_value(layer, here.value, kept.value)
        ropes.append(delta_rope)
    return ropes


def _best(
    layer: nn.Module,
    key: torch.Tensor,
    shifted: torch.Tensor,
    alternatives: Sequence[DeltaRope],
    distance: int,
) -> DeltaRope | None:
    """Which of these turns keys `[tokens, ...]` most nearly to `shifted`, or None: no turn does."""
    fitting = [None, *(it for it in alternatives if it.rotary_dim <= layer.head_size)]
    errors = [_off_by(layer, key, shifted, each, distance) for each in fitting]
    return fitting[errors.index(min(errors))]


class _Given(NamedTuple):
    """What an attention layer caches `[tokens, heads, channels]`, and what rotated the key."""

    key: torch.Tensor
    value: torch.Tensor
    rotary: nn.Module | None


def _given(scratch: Scratch, distance: int) -> list[_Given]:
    """What each layer is given to cache with positions from `distance` on."""
    given: list[_Given] = []
    latest: list[tuple[nn.Module, torch.Tensor]] = []

    def note_rotation(module: nn.Module, _: Any, output: Any) -> None:
        latest[:] = [(module, output[1].clone())]

    def noting(layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward

        def note_kv(*args: Any, **kwargs: Any) -> Any:
            key, value = token_kv.given(layer, args, kwargs)
            rotated = bool(latest) and points_as(latest[0][1], key)
            given.append(_Given(key.clone(), value.clone(), latest[0][0] if rotated else None))
            latest.clear()
            return forward(*args, **kwargs)

        return note_kv

    rotary = {
        id(m): m
        for layer in scratch.stack.layers
        for m in layer.modules()
        if isinstance(m, MODULES)
    }
    handles = [module.register_forward_hook(note_rotation) for module in rotary.values()]
    try:
        with ExitStack() as stack:
            for layer in scratch.stack.attention:
                stack.enter_context(in_the_place_of([layer], noting(layer)))
            scratch.forward(distance)
    finally:
        for handle in handles:
            handle.remove()
    return given


def _copy(output: Any) -> Any:
    """Of tensors, alone or in a tuple: the next layer changes them in place."""
    if isinstance(output, tuple):
        return tuple(_copy(each) for each in output)
    return output.clone() if isinstance(output, torch.Tensor) else output


def points_as(rotated: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a cached key is what was rotated, or that at another length: Llama 4 normalises keys
    behind their rotation, without weights, and so turns none of them."""
    if rotated.numel() != key.numel():
        return False
    both = (heads.reshape(-1, key.shape[-1]).float() for heads in (rotated, key))
    same = torch.equal(rotated.reshape(-1), key.reshape(-1))
    return same or bool((nn.functional.cosine_similarity(*both, dim=-1) > _SAME_DIRECTION).all())


def prove_rotation(
    layer: nn.Module,
    key: torch.Tensor,
    shifted: torch.Tensor,
    delta_rope: DeltaRope | None,
    distance: int,
    angle_error: float = 0.0,
) -> None:
    """`shifted` must be `key` rotated by `distance`, or equal to it where there is no rotation.

    Args:
        angle_error: radians by which the model's own angles may be off.
    """
    error = _off_by(layer, key, shifted, delta_rope, distance)
    # The model rounds its cosines to its dtype; a wrong rotation is off by about 1.
    if not error < 16 * max(torch.finfo(key.dtype).eps, 2.0**-16) + angle_error:
        what = (
            "carries positions that no rotary module explains"
            if delta_rope is None
            else "does not turn with its position as its rotary module says"
        )
        raise RopeError(f"{layer.layer_name}: the cached key {what} (off by {error:.2g})")


def _off_by(
    layer: nn.Module,
    key: torch.Tensor,
    shifted: torch.Tensor,
    delta_rope: DeltaRope | None,
    distance: int,
) -> float:
    """How far `shifted` is from `key`, rotated by `distance` if it is, as a share of its norm."""
    expected = key = key.view(-1, *token_kv.key_shape(layer))
    if delta_rope is not None:
        deltas = torch.full((len(key),), distance, device=key.device)
        expected = delta_rope.rotate(key, deltas)
    return float((expected.float() - shifted.view_as(key).float()).norm() / key.float().norm())


def prove_value(layer: nn.Module, value: torch.Tensor, shifted: torch.Tensor) -> None:
    """`shifted`, of the same tokens at other positions, must be `value` `[tokens, ...]`.

    Compared token by token: what grows with the position hardly shows in the norm of all.
    """
    own, other = value.flatten(1).float(), shifted.flatten(1).float()
    norm = torch.maximum(own.norm(dim=1), other.norm(dim=1)).clamp(min=torch.finfo(own.dtype).tiny)
    error = float(((other - own).norm(dim=1) / norm).max())
    # Computed the same way from the same numbers: as a rule, not a bit is different.
    if not error <= 4 * max(torch.finfo(value.dtype).eps, 2.0**-16):
        raise RopeError(
            f"{layer.layer_name}: the cached value depends on its position, and values are moved "
            f"as they are (off by {error:.2g})"
        )
