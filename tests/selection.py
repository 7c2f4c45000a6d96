# SPDX-License-Identifier: Apache-2.0
"""Which tests run at every push, and which `make everything` adds.

A test runs at every push unless it is marked `slow`; `--slow` runs all. A test that starts engines
or servers may be marked only where it repeats a promise that other tests show at every push, and
says so in one line:

    pytest.mark.slow("two ranks, each with a part of a row", instead="e2e/test_tier")

The first argument is what makes it another test than those that `instead` names: modules, from the
folder `tests`, separated by spaces, each with a test that runs at every push.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

SLOW = "slow"
_TESTS = Path(__file__).parent
_FORM = 'pytest.mark.slow("what is different here", instead="e2e/test_tier test_scheduler")'


def check(items: Sequence[pytest.Item], engine_tests: Path) -> None:
    """Tests with engines that are left out of a push say what stands in for them there.

    Args:
        items: tests that were collected. Modules that `instead` names are looked for among them,
            and on the disk if they are not there.
        engine_tests: the folder of tests that start engines or servers.

    Raises:
        UsageError: a mark has another form, or a module that it names does not run at a push.
    """
    collected = {module_of(item) for item in items}
    at_push = {module_of(item) for item in items if not is_slow(item)}
    for item in items:
        if not item.path.is_relative_to(engine_tests):
            continue
        for mark in item.iter_markers(SLOW):
            for module in _named(item, mark):
                if module in collected - at_push:
                    raise pytest.UsageError(
                        f"{item.nodeid}: tests/{module}.py is to run instead at every push, and "
                        "has no test that does; name another module, or leave the mark out"
                    )


def is_slow(item: pytest.Item) -> bool:
    """Whether it is left out of a push."""
    return item.get_closest_marker(SLOW) is not None


def module_of(item: pytest.Item) -> str:
    """As `instead` names it."""
    return item.path.relative_to(_TESTS).with_suffix("").as_posix()


def _named(item: pytest.Item, mark: pytest.Mark) -> Iterable[str]:
    why = mark.args[0] if len(mark.args) == 1 else None
    instead = mark.kwargs.get("instead")
    if not (isinstance(why, str) and why.strip() and "\n" not in why) or not (
        isinstance(instead, str) and instead.strip() and mark.kwargs.keys() == {"instead"}
    ):
        raise pytest.UsageError(f"{item.nodeid}: it is left out of every push; say why: {_FORM}")
    for module in instead.split():
        if not (_TESTS / f"{module}.py").is_file():
            raise pytest.UsageError(f"{item.nodeid}: instead={module!r}: no tests/{module}.py")
        yield module
