# SPDX-License-Identifier: Apache-2.0
"""What a server, a model or a request may use beside plain reuse: one folder each.

    options.py      keys of the server's options and of a request's
    metrics.py      rows of the table of metrics
    scheduler.py    its half in the scheduler's process (`scheduling/feature.py`)
    worker.py       its half in a worker (`prefill/feature.py`); only this may import torch
    api.py          routes of the administrator

A folder has those of these files that the feature needs. To add a feature, add its folder, and its
name to `FEATURES`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

FEATURES = (
    "knowledge",
    "audit",
    "trained",
    "compressed",
    "images",
    "similar",
    "conversations",
    "tier",
    "explain",
    "tracing",
    "viewer",
)
"""The folders, in the order in which a request passes the features."""


def having(file: str) -> list[ModuleType]:
    """Modules of this name, of the features that have one, in order."""
    names = [f"{__name__}.{feature}.{file}" for feature in FEATURES]
    return [importlib.import_module(name) for name in names if find_spec(name) is not None]
