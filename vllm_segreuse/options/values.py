# SPDX-License-Identifier: Apache-2.0
"""Kinds of values that options take, as pydantic's validators.

Each raises `ValueError` with what is allowed; the text follows "option=value".
"""

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BeforeValidator, ValidationError

MAX_TOKENS = 2**31 - 1
"""Also keeps integers within what msgpack carries to the engine."""


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # repr() of an integer beyond sys.int_info's digit limit raises.
        return repr(x) if abs(x) < 10**18 else "an integer beyond 64 bits"


_short = _ShortRepr()
_short.maxstring = _short.maxother = 48
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 3
_short.maxlevel = 2


def short_repr(value: object) -> str:
    """`repr(value)` bounded in length and in time, whatever a client sent."""
    return _short.repr(value)


def is_number(value: object) -> bool:
    """True for finite float, and int that msgpack carries to the engine; bool is none here."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_int(value: object) -> bool:
    """True for integers; bool is none here."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(most: float, null: str | None = None) -> BeforeValidator:
    """A number from 0 to `most`; with `null`, also None, which means that."""
    bounds = "from 0 on" if most == math.inf else f"from 0 to {most:g}"
    wrong = f"must be a number {bounds}" + (f", or null for {null}" if null else "")

    def check(value: Any) -> float | None:
        if value is None and null:
            return None
        if not (is_number(value) and 0 <= value <= most):
            raise ValueError(wrong)
        return float(value)

    return BeforeValidator(check)


def count(low: int, high: int, null: str | None = None) -> BeforeValidator:
    """An integer from `low` to `high`; with `null`, also None, which means that."""
    wrong = f"must be an integer from {low} to {high}" + (f", or null for {null}" if null else "")

    def check(value: Any) -> Any:
        if value is None and null:
            return None
        if not is_int(value) or not low <= value <= high:
            raise ValueError(wrong)
        return value

    return BeforeValidator(check)


def switch(value: Any) -> Any:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def inner_share(value: Any) -> float:
    """A share that is not empty."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError("must be a number above 0 and up to 1")
    return float(value)


def path(value: Any) -> Any:
    """A path, or None."""
    if value is not None and (not isinstance(value, str) or not value or "\0" in value):
        raise ValueError("must be a path, or null")
    return value


def tokens_or_null(low: int, null: str) -> BeforeValidator:
    """An integer from `low` to `MAX_TOKENS`, or None, which means what `null` says."""
    return count(low, MAX_TOKENS, null)


def flag(value: Any) -> bool:
    """True or false of a request."""
    # vLLM turns a true of `vllm_xargs` into 1.
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError("must be true or false")
    return bool(value)


def unknown_text(key: object, allowed: Iterable[str]) -> str:
    """One sentence about a key that there is not."""
    return f"unknown option {short_repr(key)}; allowed are {', '.join(sorted(allowed))}"


def first_error(error: ValidationError) -> tuple[str, str]:
    """The first of pydantic's errors: the field ("" if it is none's) and one sentence."""
    first = error.errors(include_url=False)[0]
    rule = str(first.get("ctx", {}).get("error", first["msg"]))
    if not first["loc"]:
        return "", rule
    option = ".".join(str(part) for part in first["loc"])
    return option, f"{option}={short_repr(first['input'])} {rule}"


def only_known(data: Any, fields: Mapping[str, Any], otherwise: str = "") -> Any:
    """What a block of options was given.

    Args:
        fields: of the block.
        otherwise: what may be given instead of a block, for the text.

    Raises:
        ValueError: it is no mapping, or names an option that there is not.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"must be a mapping of options{otherwise}")
    for key in data:
        if key not in fields:
            raise ValueError(f"has the {unknown_text(key, fields)}")
    return data
