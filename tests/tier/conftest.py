# SPDX-License-Identifier: Apache-2.0
"""Stores of the file tier are made with fewer folders, which is quicker."""

import pytest

from vllm_segreuse.tier import folder


@pytest.fixture(autouse=True)
def _few_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_FOLDERS", 4)
