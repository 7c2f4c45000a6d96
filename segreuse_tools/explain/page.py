# SPDX-License-Identifier: Apache-2.0
"""An explanation as one HTML page, which needs nothing from anywhere else."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from segreuse_extras.viewer import words
from segreuse_extras.viewer.asking import Explanation
from segreuse_extras.viewer.strip import strip
from segreuse_extras.viewer.templating import STATIC, environment, source_hash

HERE = Path(__file__).parent


def render(explanation: Explanation, name: str) -> str:
    """The page.

    Args:
        name: of the request, for the title.
    """
    style, script = _read("viewer.css"), _read("viewer.js")
    return (
        environment(HERE / "templates")
        .get_template("alone.html")
        .render(
            strip=strip(explanation.report, explanation.texts),
            edited=words.edited(explanation.edit),
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


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
