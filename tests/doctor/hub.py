# SPDX-License-Identifier: Apache-2.0
"""A cache of the Hugging Face hub with one model in several revisions."""

import json
from pathlib import Path
from typing import Any

import pytest


def fill(
    cache: Path, model: str, revisions: dict[str, dict[str, Any]], patch: pytest.MonkeyPatch
) -> dict[str, Path]:
    """Makes `cache` the local cache, which holds nothing else.

    Args:
        revisions: `config.json` by name of the revision.

    Returns:
        The folder of each; its name is that of the commit.
    """
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    place = cache / f"models--{model.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    folders = {}
    for number, (revision, config) in enumerate(revisions.items()):
        folders[revision] = place / "snapshots" / f"{number:040x}"
        folders[revision].mkdir(parents=True)
        (folders[revision] / "config.json").write_text(json.dumps(config))
        (place / "refs" / revision).write_text(folders[revision].name)
    return folders
