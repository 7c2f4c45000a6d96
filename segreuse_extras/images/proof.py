# SPDX-License-Identifier: Apache-2.0
"""Images of M-RoPE models: tokens are numbered as `plan/images.py` says, and turn as text does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.rope import RopeError
from vllm_segreuse.plan import Image, Images
from vllm_segreuse.plan.images import ROWS
from vllm_segreuse.prefill.checks import PassParts
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.proofs.passes import prove_passes
from vllm_segreuse.prefill.proofs.rotations import prove_rotations
from vllm_segreuse.prefill.proofs.scratch import Scratch

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger("vllm.segreuse")

_PROMPTS = (
    (0, (4, 4), 7),
    (5, (2, 3), 1, (5, 2), 9, (1, 1), 4, (1, 6), 2),
    (1, (7, 1), 0, (3, 8), 0),
)
"""Tokens of text, rows and columns of an image, tokens of text, and so on."""


def prove_images(model: nn.Module, config: ModelConfig, parts: PassParts) -> int | None:
    """What must hold for images to be reused; only text is, where it does not.

    Args:
        model: as loaded.
        config: vLLM's, of the model.
        parts: of the sparse pass; proofs on text have succeeded on them.

    Returns:
        Patches per token in a row, and in a column; None: images are not reused.
    """
    if not config.uses_mrope:
        return None
    try:
        merge_size = _prove_numbers(model, config)
        prefill = SparsePrefill(parts.layers(), parts.aligner, parts.draft_runner)
        prove_moved_images(parts.scratch, prefill)
    except (UnsupportedModelError, RopeError) as error:
        logger.warning("segment reuse: prompts with images run without it: %s", error)
        return None
    return merge_size


def _prove_numbers(model: nn.Module, config: ModelConfig) -> int:
    """The model itself is asked for the numbers of prompts with images."""
    name = type(model).__name__
    multimodal = config.multimodal_config
    if multimodal is not None and multimodal.is_multimodal_pruning_enabled():
        raise UnsupportedModelError(
            f"{name} prunes videos, and numbers the tokens of images by their embeddings; remove "
            "--video-pruning-rate"
        )
    merge_size = getattr(getattr(config.hf_config, "vision_config", None), "spatial_merge_size", 0)
    if not merge_size:
        raise UnsupportedModelError(f"the configuration of {name} has no spatial_merge_size")
    for parts in _PROMPTS:
        images, count = _prompt(parts)
        features = [_feature(image, merge_size) for image in images.images]
        try:
            numbers, behind = model.get_mrope_input_positions(list(range(count)), features)
        except Exception as error:
            raise UnsupportedModelError(
                f"{name} does not number images by their grid alone ({error!r})"
            ) from error
        expected = torch.from_numpy(images.mrope_positions(0, count + 1)).long()
        numbers = torch.as_tensor(numbers)
        if (
            numbers.shape != (ROWS, count)
            or not torch.equal(numbers.long(), expected[:, :count])
            or behind != int(expected[0, count]) - count
        ):
            raise UnsupportedModelError(
                f"{name} numbers the tokens of images otherwise than by rows and columns"
            )
    return int(merge_size)


def _prompt(parts: Sequence[Any]) -> tuple[Images, int]:
    """The images of a prompt, and how many tokens it has."""
    images, at = [], 0
    for part in parts:
        if isinstance(part, tuple):
            images.append(Image(at, *part))
            at = images[-1].stop
        else:
            at += part
    return Images(images), at


def _feature(image: Image, merge_size: int) -> MultiModalFeatureSpec:
    grid = torch.tensor([1, image.height * merge_size, image.width * merge_size])
    data: Any = {"image_grid_thw": SimpleNamespace(data=grid)}
    place = PlaceholderRange(image.start, image.stop - image.start)
    return MultiModalFeatureSpec(data, "image", "start-up proof", place)


def prove_moved_images(scratch: Scratch, prefill: SparsePrefill) -> None:
    """With an image in the middle of the scratch tokens, keys turn by one distance in all rows, and
    the pass computes what the model's own forward does.

    Embeddings are those of token ids: the pass never computes tokens of an image, but text behind
    one, whose numbers are not its indices.
    """
    side = max(1, math.isqrt(scratch.count // 3))
    scratch.mrope_positions = Images([Image(scratch.count // 8, side, side + 1)]).mrope_positions(
        0, scratch.count + 1
    )
    try:
        prove_rotations(scratch)
        prove_passes(scratch, prefill)
    finally:
        scratch.mrope_positions = None
