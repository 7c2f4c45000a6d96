# SPDX-License-Identifier: Apache-2.0
"""Templates and files of pages that show an explanation: the viewer's, and the command's."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from segreuse_extras.viewer.strip import WIDTH

HERE = Path(__file__).parent
STATIC = HERE / "static"


@functools.cache
def environment(*folders: Path) -> Environment:
    """Templates of these folders, and of this one; every value that they show is escaped."""
    loader = FileSystemLoader([*folders, HERE / "templates"])
    found = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["STRIP_WIDTH"] = WIDTH
    return found


def source_hash(text: str) -> str:
    """What a Content-Security-Policy calls an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
