# SPDX-License-Identifier: Apache-2.0
"""vLLM announces every engine and every reset; thousands of them are of no use."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)
