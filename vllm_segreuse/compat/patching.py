# SPDX-License-Identifier: Apache-2.0
"""How the files beside this one replace attributes of vLLM: once each, and never by accident."""

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

_MARK = "__segreuse__"


def wrap(owner: type | ModuleType, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces the function `owner.name` by `make(original)`; a second call changes nothing.

    Static and class methods stay what they are; `make` sees the plain function.

    Raises:
        RuntimeError: `owner` itself defines no such function.
    """
    found = vars(owner).get(name)
    original = getattr(found, "__func__", found)
    if not callable(original):
        raise RuntimeError(
            f"segment reuse has to wrap {_full_name(owner)}.{name}, which this vLLM does not have; "
            "install a supported vLLM, or start without segment reuse"
        )
    if hasattr(original, _MARK):
        return
    replacement: Any = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, True)
    if isinstance(found, staticmethod | classmethod):
        replacement = type(found)(replacement)
    setattr(owner, name, replacement)


def signature_with(original: Callable[..., Any], *names: str) -> inspect.Signature:
    """The signature of a function that is wrapped, which has these parameters.

    Raises:
        RuntimeError: it lacks one.
    """
    signature = inspect.signature(original)
    for name in names:
        if name not in signature.parameters:
            raise RuntimeError(
                f"segment reuse has to see the {name} of {original.__qualname__}, which this vLLM "
                "does not have; install a supported vLLM, or start without segment reuse"
            )
    return signature


def add_method(owner: type, name: str, method: Callable[..., Any]) -> None:
    """Gives `owner` the new method `name`; a second call changes nothing.

    Raises:
        RuntimeError: `owner` has something else under this name.
    """
    if not hasattr(owner, name):
        setattr(method, _MARK, True)
        setattr(owner, name, method)
    elif not hasattr(getattr(owner, name), _MARK):
        raise RuntimeError(
            f"segment reuse has to add {_full_name(owner)}.{name}, but the name is taken"
        )


def _full_name(owner: type | ModuleType) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"


def of_this_platform(classes: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of modules that may be imported here.

    `vllm/v1/worker/cpu_worker.py` replaces streams, events and pinned memory in torch for the whole
    process: on a GPU that would be the end of it.
    """
    from vllm.platforms import current_platform

    return [it for it in classes if current_platform.is_cpu() or ".cpu_" not in it[0]]
