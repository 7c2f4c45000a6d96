# SPDX-License-Identifier: Apache-2.0
"""Who is called before a module runs: torch tells nobody."""

from collections.abc import Callable
from typing import Any

from torch import nn


def pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The module's own, by number: what is taken out of it is called no more."""
    return module._forward_pre_hooks
