# SPDX-License-Identifier: Apache-2.0
"""Formats of keys, as "{speedup:.1f}x", and how they are filled in."""

import math
import string
from collections.abc import Mapping
from typing import Any

from bench.tables.results import Finding


def written(value: str, values: Mapping[str, Any], place: str) -> str:
    """A format of keys, filled in.

    Raises:
        Finding: it is no format, a key is missing, or what it holds cannot be written so.
    """
    try:
        named = keys(value)
    except ValueError as error:
        raise Finding(str(error)) from None
    for key in named:
        found = values.get(key)
        if key not in values:
            raise Finding(f"{place} has no key {key!r}")
        if isinstance(found, float) and not math.isfinite(found):
            raise Finding(f"{place} has no finite number for {key!r}, but {found}")
    try:
        text = _Keys().vformat(value, (), values)
    except (ValueError, TypeError, LookupError) as error:
        raise Finding(f"{place} cannot be written as {value!r}: {error}") from None
    return " ".join(text.split())


def keys(value: str) -> list[str]:
    """The keys of a format.

    Raises:
        ValueError: it is no format, or has none.
    """
    try:
        named = [name for _, name, _, _ in string.Formatter().parse(value) if name]
    except ValueError as error:
        raise ValueError(f"{value!r} is no format: {error}") from None
    if not named:
        raise ValueError(f"{value!r} names no key of the results, as '{{key:.2f}}' does")
    return named


class _Keys(string.Formatter):
    """Keys as they are: no attributes, no items of a value."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs[field_name], field_name
