# SPDX-License-Identifier: Apache-2.0
"""How the files beside this one replace attributes of vLLM: once each, and never by accident."""

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

_MARK = "__segreuse__"


def wrap(
    owner: type | ModuleType, name: str, make: Callable[..., Callable[..., Any]], *given: Any
) -> None:
    """Replaces the function `owner.name` by `make(original, *given)`, once.

    Static and class methods stay what they are; `make` sees the plain function.

    Raises:
        RuntimeError: `owner` itself defines no such function, or vLLM may pass it what the
            replacement does not take.
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
    made = make(original, *given)
    if unknown := untaken(inspect.signature(made), inspect.signature(original)):
        raise RuntimeError(
            f"segment reuse wraps {_full_name(owner)}.{name}, which takes {unknown!r} in this "
            "vLLM, and the wrapper does not; install a supported vLLM, or start without segment "
            "reuse"
        )
    replacement: Any = functools.wraps(original)(made)
    setattr(replacement, _MARK, True)
    if isinstance(found, staticmethod | classmethod):
        replacement = type(found)(replacement)
    setattr(owner, name, replacement)


def untaken(ours: inspect.Signature, theirs: inspect.Signature) -> str | None:
    """The first parameter that calls written for `theirs` may pass and `ours` does not take, by
    place or by name; None: there is none."""
    kinds = {it.kind for it in ours.parameters.values()}
    any_place, any_name = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    only_place, only_name = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
    names = {it.name for it in ours.parameters.values() if it.kind not in (only_place, any_place)}
    places = [it for it in ours.parameters.values() if it.kind not in (only_name, any_name)]
    num_places = sum(it.kind is not any_place for it in places)
    for place, (name, wanted) in enumerate(theirs.parameters.items()):
        by_place = wanted.kind not in (only_name, any_name)
        by_name = wanted.kind not in (only_place, any_place) and name not in ("self", "cls")
        takes_place = any_place in kinds or (place < num_places and wanted.kind is not any_place)
        takes_name = any_name in kinds or (name in names and wanted.kind is not any_name)
        if (by_place and not takes_place) or (by_name and not takes_name):
            return name
    return None


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
