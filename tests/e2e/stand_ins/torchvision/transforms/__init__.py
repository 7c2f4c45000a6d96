# SPDX-License-Identifier: Apache-2.0
"""Ways to resize an image."""

from enum import Enum


class InterpolationMode(Enum):
    """By name, as torch calls them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
