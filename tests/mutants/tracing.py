# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: says which file of tests runs, to coverage, and how long each took.

`lines.traced` uses it. Processes that tests start find the file in their environment.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import coverage
import pytest

FILE, SECONDS = "SEGREUSE_TESTS_FILE", "SEGREUSE_TESTS_SECONDS"
"""Variables of the environment: the file that runs, and where durations are written."""

_seconds: Counter[str] = Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    file = item.nodeid.partition("::")[0]
    os.environ[FILE] = file
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(file)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # it is told what its workers have run
        Path(os.environ[SECONDS]).write_text(json.dumps(_seconds))
