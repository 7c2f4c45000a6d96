# SPDX-License-Identifier: Apache-2.0
"""The newer interface, as far as transformers imports it."""

from torchvision.transforms import InterpolationMode, functional

__all__ = ["InterpolationMode", "functional"]
