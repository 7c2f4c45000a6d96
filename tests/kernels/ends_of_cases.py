# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: of each test function, the first and the last of its cases."""

import pytest


@pytest.hookimpl(trylast=True)  # of those that `-k` has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is between them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    ends = {end.nodeid for of_one in cases.values() for end in (of_one[0], of_one[-1])}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ends])
    items[:] = [item for item in items if item.nodeid in ends]
