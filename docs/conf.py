# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds the site: `make docs`."""

import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
sys.path[:0] = [str(HERE), str(REPOSITORY)]

import generate  # noqa: E402 - found beside this file

_about = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

project = _about["name"]
version = release = _about["version"]
author = "the authors of vllm-segreuse"
project_copyright = f"{author}, {_about['license']}"

extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["_generated"]
smartquotes = False  # options begin with two hyphens
nitpicky = True
myst_heading_anchors = 4  # links to headings, as `options.md#request`, are checked
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}
highlight_language = "none"  # fenced blocks that name no language: commands, diagrams
pygments_style, pygments_dark_style = "friendly", "github-dark"


def setup(app: Any) -> None:
    """Writes the tables that come from the code before any page is read."""
    app.connect("builder-inited", lambda app: generate.main(HERE / "_generated"))
