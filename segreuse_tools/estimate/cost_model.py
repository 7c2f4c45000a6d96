# SPDX-License-Identifier: Apache-2.0
"""How long a device takes for a prompt: a time for each token, and one for each pair of tokens of
which one attends to the other. What waits for others, and what copies KV, is not counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import exp, floor, inf, log
from pathlib import Path

import numpy as np

from segreuse_tools.model_folder import InputError


@dataclass(frozen=True)
class CostModel:
    """A device with a model.

    Attributes:
        token_s: seconds for each token.
        pair_s: seconds for each token that a computed token attends to.
    """

    token_s: float
    pair_s: float = 0.0

    def seconds(self, computed: float, start: int, tokens: int) -> float:
        """For so many tokens, spread evenly over positions `[start, tokens)` of a prompt."""
        return computed * (self.token_s + self.pair_s * (start + tokens + 1) / 2)


def measured(file: Path) -> CostModel:
    """Of a results file of `bench ttft` or `bench gpu`: its full prefills of the shape that it has
    most lengths of. With a single length, attention is part of the time for each token.

    Raises:
        InputError: it is no such file.
    """
    by_shape: dict[str, dict[int, float]] = {}
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            if "full" in (row.get("mode"), row.get("policy")) and "median_ms" in row:
                tokens = int(row.get("prompt_tokens") or row["tokens"])
                seconds = row["median_ms"] / 1e3
                if tokens > 0 and 0 < seconds < inf:
                    by_shape.setdefault(str(row.get("shape")), {})[tokens] = seconds
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        by_shape = {}
    if not by_shape:
        raise InputError(f"{file} has no times of full prefills, as those of `bench ttft` have")
    found = max(by_shape.values(), key=len)
    lengths, times = np.array([*found], float), np.array([*found.values()])
    pairs = lengths * (lengths + 1) / 2
    if len(lengths) > 1:
        terms = np.stack([lengths, pairs], axis=1) / times[:, None]
        token_s, pair_s = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0]
        if token_s > 0 and pair_s >= 0:
            return CostModel(float(token_s), float(pair_s))
    return CostModel(float(np.median(times / lengths)))


class Spread:
    """Values whose quantiles are asked for, to within a hundredth of each; in bounded memory."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._zeros = 0

    def add(self, value: float) -> None:
        """One more; at least 0."""
        if value > 0:
            self._bins[floor(log(value) / _STEP)] += 1
        else:
            self._zeros += 1

    def quantile(self, share: float) -> float:
        """The value that such a share is not above; 0 of none."""
        left = share * (self._zeros + self._bins.total()) - self._zeros
        for number in sorted(self._bins) if left > 0 else ():
            left -= self._bins[number]
            if left <= 0:
                return exp((number + 0.5) * _STEP)
        return 0.0


_STEP = log(1.01)
