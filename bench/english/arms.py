# SPDX-License-Identifier: Apache-2.0
"""Policies that are compared: `default` is what a request without options gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.parsing import RequestError, parse_request

FULL = "full"
DEFAULT = "default"
SHIFT = "shift"
CLOSE = "close"
CLOSE_CONFIG = Path(__file__).parents[2] / "configs/close.yaml"
NAMED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        DEFAULT: {},
        CLOSE: SegReuseConfig.from_yaml(CLOSE_CONFIG).model_dump(exclude_unset=True),
        SHIFT: {"policy": "shift"},
        "epic": {"policy": "epic", "recompute_ratio": 0.15},
        "cacheblend": {"policy": "cacheblend", "recompute_ratio": 0.15},
        "sparsex": {"policy": "sparsex", "dense_layers": 0, "recompute_ratio": 0.15},
        "hybrid": {"policy": "sparsex", "dense_layers": 0.15, "recompute_ratio": 0.15},
        "hybrid-half": {"policy": "sparsex", "dense_layers": 0.5, "recompute_ratio": 0.3},
        "prophet": {"policy": "prophet", "recompute_ratio": 0.1},
        "prophet-20": {"policy": "prophet", "recompute_ratio": 0.2},
        "peaks": {"policy": "peaks", "recompute_ratio": 0.1},
        "focus-10": {"policy": "focus", "recompute_ratio": 0.1},
        "focus-20": {"policy": "focus", "recompute_ratio": 0.2},
        "focus-30": {"policy": "focus", "recompute_ratio": 0.3},
        "all": {"policy": "sparsex", "dense_layers": 0, "recompute_ratio": 1.0},
    }
)
"""Options by name. `all` computes everything again: what it differs by is rounding."""
PUBLISHED = (
    *(DEFAULT, CLOSE, SHIFT, "epic", "cacheblend", "sparsex", "hybrid", "hybrid-half"),
    *("prophet", "prophet-20", "peaks"),
)
QUICK = (DEFAULT, CLOSE, SHIFT)


@dataclass(frozen=True)
class Arm:
    """One way to reuse documents.

    Attributes:
        name: as a table has it.
        options: of the request, without `segreuse_`.
    """

    name: str
    options: Mapping[str, Any]

    @property
    def extra_args(self) -> dict[str, Any]:
        """The options as a request carries them."""
        return {f"segreuse_{key}": value for key, value in self.options.items()}


def arm(text: str) -> Arm:
    """The arm that a text names: one of `NAMED`, or `POLICY:option=value:option=value`.

    Raises:
        ValueError: there is no such policy or option; the text says what there is.
    """
    if text in NAMED:
        return Arm(text, NAMED[text])
    policy, *pairs = text.split(":")
    options: dict[str, Any] = {} if policy == DEFAULT else {"policy": policy}
    for pair in pairs:
        key, _, value = pair.partition("=")
        options[key] = yaml.safe_load(value)
    found = Arm(text, options)
    try:
        parse_request(found.extra_args, SegReuseConfig())
    except RequestError as error:
        raise ValueError(
            f"no policy {text!r} ({error}); there are {', '.join(NAMED)}, and POLICY:option=value"
        ) from None
    return found
