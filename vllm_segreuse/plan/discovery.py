# SPDX-License-Identifier: Apache-2.0
"""The modules of a folder: a file that is added there need not be listed anywhere."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def modules_of(package: str) -> dict[str, ModuleType]:
    """The modules of a package by name, in alphabetical order, without `base` and private ones.

    Args:
        package: its full name.
    """
    names = sorted(module.name for module in iter_modules(import_module(package).__path__))
    return {
        name: import_module(f"{package}.{name}")
        for name in names
        if name != "base" and not name.startswith("_")
    }
