# SPDX-License-Identifier: Apache-2.0
"""The same functions as in the older interface."""

from torchvision.transforms.functional import *  # noqa: F403
from torchvision.transforms.functional import InterpolationMode as InterpolationMode
