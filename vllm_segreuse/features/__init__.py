# SPDX-License-Identifier: Apache-2.0
"""What a server, a model or a request may use beside plain reuse: one folder each.

    options.py      keys of the server's options and of a request's
    refusals.py     what it refuses when an engine starts
    metrics.py      rows of the table of metrics
    scheduler.py    its half in the scheduler's process (`scheduling/feature.py`)
    worker.py       its half in a worker (`prefill/feature.py`); this and the next may import torch
    stages.py       what binds a worker to other pipeline stages (`prefill/checks.py`)
    api.py          routes of the administrator
    compress.py     documents of knowledge bases of which a share is kept
    documents.py    documents of knowledge bases that its models see alone (`features/knowledge/`)
    runtime.py      what carries plans out in the place of the pass (`config/in_worker.py`)
    front.py        its half in an API server (`serve/front.py`)
    checks.py       what it refuses of requests before an engine gets them (`serve/requests.py`)
    launch.py       a connector in the place of ours (`config/launch.py`): its `CONNECTOR`, the
                    engine's role, and an engine's configuration completed for it

A folder has those of these files that the feature needs. To add a feature, add its folder, and its
name to `FEATURES`. The folders are here, and in `segreuse_extras/`, which the rest of this package
never imports.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

FEATURES = (
    "vllm_segreuse.features.knowledge",
    "segreuse_extras.audit",
    "segreuse_extras.trained",
    "segreuse_extras.compressed",
    "segreuse_extras.images",
    "segreuse_extras.similar",
    "segreuse_extras.conversations",
    "segreuse_extras.context",
    "segreuse_extras.coalescing",
    "segreuse_extras.healing",
    "vllm_segreuse.features.tier",
    "segreuse_extras.transfer",
    "segreuse_extras.pipeline",
    "segreuse_extras.windows",
    "segreuse_extras.states",
    "segreuse_extras.explain",
    "segreuse_extras.tracing",
    "segreuse_extras.viewer",
)
"""The folders, in the order in which a request passes the features."""


def having(file: str) -> list[ModuleType]:
    """Modules of this name, of the features that have one, in order."""
    names = [f"{feature}.{file}" for feature in FEATURES]
    return [importlib.import_module(name) for name in names if find_spec(name) is not None]
