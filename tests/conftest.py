# SPDX-License-Identifier: Apache-2.0
"""For all tests: every core, a small cache, no network, no telemetry; the quick ones first."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from bench.server import cpu_environment

# Before anything imports torch or vLLM, which read them once. What the caller has set stays.
for _name, _value in cpu_environment().items():
    os.environ.setdefault(_name, _value)

# A shared machine may stall for longer than any deadline; what fails is printed to be repeated.
settings.register_profile("segreuse", deadline=None, print_blob=True)
settings.load_profile("segreuse")

_E2E = Path(__file__).parent / "e2e"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--slow`."""
    parser.addoption("--slow", action="store_true", help="run what is marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts engines or servers as `e2e`, and run it after everything else; leave the
    slow ones out, unless they are wanted."""
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    for item in items:
        if item.path.is_relative_to(_E2E):
            item.add_marker(pytest.mark.e2e)
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)  # stable
