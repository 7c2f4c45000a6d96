# SPDX-License-Identifier: Apache-2.0
"""A patch lands once, keeps the kind of function, and a missing target says so."""

import inspect
from typing import Any

import pytest

from vllm_segreuse.compat.patching import add_method, wrap


def doubled(original: Any) -> Any:
    def replacement(*args: Any) -> Any:
        return 2 * original(*args)

    return replacement


def make_class() -> Any:
    class Upstream:
        def plain(self, x: int) -> int:
            return x

        @staticmethod
        def static(x: int) -> int:
            return x

        @classmethod
        def of_class(cls, x: int) -> int:
            return x

    return Upstream


@pytest.mark.parametrize("name", ["plain", "static", "of_class"])
def test_wrapping_twice_wraps_once(name: str) -> None:
    upstream = make_class()
    signature = inspect.signature(getattr(upstream, name))
    wrap(upstream, name, doubled)
    wrap(upstream, name, doubled)
    assert getattr(upstream(), name)(4) == 8
    assert inspect.signature(getattr(upstream, name)) == signature


def test_missing_target_raises_with_its_name() -> None:
    with pytest.raises(RuntimeError, match=r"Upstream\.renamed.*does not have"):
        wrap(make_class(), "renamed", doubled)


def test_inherited_function_is_no_target() -> None:
    base = make_class()
    derived = type("Derived", (base,), {})
    with pytest.raises(RuntimeError, match=r"Derived\.plain"):
        wrap(derived, "plain", doubled)


def test_added_method_never_replaces_vllms() -> None:
    def method(self: Any) -> str:
        return "ours"

    upstream = make_class()
    add_method(upstream, "segreuse_status", method)
    add_method(upstream, "segreuse_status", method)
    assert upstream().segreuse_status() == "ours"
    with pytest.raises(RuntimeError, match="taken"):
        add_method(upstream, "plain", method)
