# SPDX-License-Identifier: Apache-2.0
"""By which rotation each layer's keys carry their position."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_segreuse.model import rope, token_kv
from vllm_segreuse.model.rope import DeltaRope, RopeError
from vllm_segreuse.model.rotary import MODULES
from vllm_segreuse.prefill.proofs.scratch import Scratch

_SAME_DIRECTION = 0.999
"""Cosine of two heads of which one is the other, scaled and rounded."""


@torch.inference_mode()
def prove_rotations(scratch: Scratch) -> list[DeltaRope | None]:
    """Rotation of each layer, None where keys carry no position (NoPE).

    A layer's rotation is derived from the rotary module whose output is the key it caches. It
    is then proven on the model: with all positions moved by the same distance, attention sees
    the same relative positions, so every layer must cache the same keys, rotated by that
    distance. Leaves the tokens' KV at their own positions in the first scratch blocks.
    """
    with scratch.unrounded():
        moved, _ = _keys(scratch, scratch.distance)
        keys, rotary = _keys(scratch, 0)
    scratch.forward()
    ropes = []
    for layer, key, shifted, module in zip(
        scratch.stack.attention, keys, moved, rotary, strict=True
    ):
        delta_rope = None if module is None else rope.derive(module, layer.layer_name)
        prove_rotation(layer, key, shifted, delta_rope, scratch.distance)
        ropes.append(delta_rope)
    return ropes


def _keys(scratch: Scratch, distance: int) -> tuple[list[torch.Tensor], list[nn.Module | None]]:
    """Keys each layer caches with positions from `distance` on, and what rotated them."""
    keys: list[torch.Tensor] = []
    modules: list[nn.Module | None] = []
    latest: list[tuple[nn.Module, torch.Tensor]] = []

    def note_rotation(module: nn.Module, _: Any, output: Any) -> None:
        latest[:] = [(module, output[1].clone())]

    def note_key(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key, _ = token_kv.given(layer, args, kwargs)
        keys.append(key.clone())
        rotated = bool(latest) and _points_as(latest[0][1], key)
        modules.append(latest[0][0] if rotated else None)
        latest.clear()

    rotary = {
        id(m): m
        for layer in scratch.stack.layers
        for m in layer.modules()
        if isinstance(m, MODULES)
    }
    handles = [module.register_forward_hook(note_rotation) for module in rotary.values()]
    for layer in scratch.stack.attention:
        handles.append(layer.register_forward_pre_hook(note_key, with_kwargs=True))
    try:
        scratch.forward(distance)
    finally:
        for handle in handles:
            handle.remove()
    return keys, modules


def _points_as(rotated: torch.Tensor, key: torch.Tensor) -> bool:
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
) -> None:
    """`shifted` must be `key` rotated by `distance`, or equal to it where there is no rotation."""
    expected = key = key.view(-1, *token_kv.key_shape(layer))
    if delta_rope is not None:
        deltas = torch.full((len(key),), distance, device=key.device)
        expected = delta_rope.rotate(key, deltas)
    error = float((expected.float() - shifted.view_as(key).float()).norm() / key.float().norm())
    # The model rounds its cosines to its dtype; a wrong rotation is off by about 1.
    if not error < 16 * max(torch.finfo(key.dtype).eps, 2.0**-16):
        what = (
            "carries positions that no rotary module explains"
            if delta_rope is None
            else "does not turn with its position as its rotary module says"
        )
        raise RopeError(f"{layer.layer_name}: the cached key {what} (off by {error:.2g})")
