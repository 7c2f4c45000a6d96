# SPDX-License-Identifier: Apache-2.0
"""Every patch of vLLM says what would make it unnecessary, in the form that docs are made from."""

import ast
import re
from pathlib import Path

import pytest

from vllm_segreuse import compat

FOLDER = Path(compat.__file__).parent
NO_PATCHES = ("__init__", "patching", "block_events")
PATCHES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NO_PATCHES)


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_says_when_it_is_obsolete(patch: str) -> None:
    text = ast.get_docstring(ast.parse((FOLDER / f"{patch}.py").read_text())) or ""
    head, *_, last = text.split("\n\n")
    assert last.startswith("Obsolete when "), f"the last paragraph of {patch}.py is {last!r}"
    assert "vLLM" in head or "vllm" in head, f"{patch}.py does not begin with what it patches"
    upstream = re.findall(r"vllm-project/vllm#\d+", last)
    assert upstream or "None filed that we know of" in " ".join(last.split())
    assert len(upstream) == last.count("#"), "references are written vllm-project/vllm#NUMBER"
