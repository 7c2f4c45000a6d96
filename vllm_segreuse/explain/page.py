# SPDX-License-Identifier: Apache-2.0
"""An explanation as one HTML page, which needs nothing from anywhere else."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vllm_segreuse.explain.client import Explanation
from vllm_segreuse.explain.strip import WIDTH, strip

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


def render(explanation: Explanation, name: str) -> str:
    """The page.

    Args:
        name: of the request, for the title.
    """
    style, script = _read("viewer.css"), _read("viewer.js")
    return (
        environment()
        .get_template("alone.html")
        .render(
            strip=strip(explanation.report, explanation.texts),
            name=name,
            policy=explanation.report["policy"],
            style=Markup(style),
            script=Markup(script),
            style_hash=source_hash(style),
            script_hash=source_hash(script),
        )
    )


def write(file: Path, explanation: Explanation, name: str) -> None:
    """Write the page to a file.

    Raises:
        OSError: it cannot be written.
    """
    file.write_text(render(explanation, name), encoding="utf-8")


def source_hash(text: str) -> str:
    """What a Content-Security-Policy calls an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
