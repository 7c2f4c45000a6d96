# SPDX-License-Identifier: Apache-2.0
"""A patch lands once, keeps the kind of function, and a missing target says so."""

import inspect
from typing import Any

import pytest
from vllm.platforms import current_platform

from vllm_segreuse.compat import model_runner, worker
from vllm_segreuse.compat.patching import add_method, of_this_platform, wrap


def doubled(original: Any) -> Any:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return 2 * original(*args, **kwargs)

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


TAKEN = [
    ("self, x, *args, **kwargs", "self, x, y=1, *, z=2", None),
    ("self, x", "self, x", None),
    ("self, x, y", "self, x, y=1", None),
    ("self, x", "self, x, y=1", "y"),
    ("self, x, *args", "self, x, y=1", "y"),
    ("self, x, **kwargs", "self, x, y=1", "y"),
    ("self, *args, **kwargs", "self, x, /, y", None),
    ("self, x, *args", "self, x, *rest", None),
    ("self, x, y", "self, x, *rest", "rest"),
    ("self, x, y", "self, x, **rest", "rest"),
    ("self, x, *args", "self, x, *, z", "z"),
    ("self, y", "self, x", "x"),
    ("self, x, y", "self, y, x", None),  # `wrap` cannot know what a wrapper does with a place
]


@pytest.mark.parametrize(("ours", "theirs", "unknown"), TAKEN)
def test_a_wrapper_takes_whatever_vllm_may_pass(
    ours: str, theirs: str, unknown: str | None
) -> None:
    upstream, replacement = type("Upstream", (), {}), eval(f"lambda {ours}: None")
    upstream.plain = original = eval(f"lambda {theirs}: None")  # type: ignore[attr-defined]
    if unknown is None:
        wrap(upstream, "plain", lambda original: replacement)
        return
    with pytest.raises(RuntimeError, match=rf"Upstream\.plain, which takes '{unknown}' in this"):
        wrap(upstream, "plain", lambda original: replacement)
    assert vars(upstream)["plain"] is original


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


def test_cpu_workers_are_not_imported_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they where an engine is patched: `test_plugin.py`."""
    classes = [*model_runner.RUNNERS, *worker.WORKERS]
    assert of_this_platform(classes) == classes
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert {name for name, _ in classes} - {name for name, _ in of_this_platform(classes)} == {
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.worker.cpu_worker",
    }
