# SPDX-License-Identifier: Apache-2.0
"""What the processors of Qwen's models do with an image."""

from typing import Any

import numpy as np
import torch

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode", "normalize", "pil_to_tensor", "resize"]


def pil_to_tensor(image: Any) -> torch.Tensor:
    """uint8 `[channels, height, width]`."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def resize(
    images: torch.Tensor, size: list[int], interpolation: InterpolationMode, antialias: bool = True
) -> torch.Tensor:
    """`[..., height, width]` in another size."""
    given = images if images.dim() == 4 else images[None]
    resized = torch.nn.functional.interpolate(
        given.float(), list(size), mode=interpolation.value, antialias=antialias
    )
    return resized.round().clamp(0, 255).to(images.dtype).view(*images.shape[:-2], *size)


def normalize(images: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """Subtract a mean and divide by a deviation, by channel."""
    mean, std = (torch.as_tensor(value)[:, None, None] for value in (mean, std))
    return (images - mean) / std


def __getattr__(name: str) -> Any:
    """Whatever else is imported by name, and not called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return None
