# SPDX-License-Identifier: Apache-2.0
"""Stores of files are made with fewer folders, which is quicker."""

import pytest

from segreuse_store import folder


@pytest.fixture(autouse=True)
def _few_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "FOLDERS", 4)
