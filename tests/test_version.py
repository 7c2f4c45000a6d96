# SPDX-License-Identifier: Apache-2.0
"""Only tested versions of vLLM are accepted, and, if that is wanted, those that were compared."""

import ast
from pathlib import Path

import pytest
import vllm

from vllm_segreuse.version import (
    CHECKED,
    SUPPORTED,
    UNTESTED_ENV,
    UnsupportedVersionError,
    require_supported_vllm,
)

COMPAT = Path(__file__).parent.parent / "vllm_segreuse" / "compat"


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTESTED_ENV, raising=False)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.1rc1", "0.32.0+cpu"])
def test_31_supported(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    require_supported_vllm()


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.3.2", "1.32.0", "dev"])
def test_31_other_versions_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UnsupportedVersionError) as caught:
        require_supported_vllm()
    assert f"found {version}" in str(caught.value)
    assert "install vLLM 0.32.x" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_31_a_version_that_never_ran_is_refused_with_its_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(UnsupportedVersionError) as caught:
        require_supported_vllm()
    assert str(caught.value) == (
        "vllm-segreuse supports vLLM 0.32.x and found 0.33.1, whose sources were compared and "
        "which has never run: install vLLM 0.32.x, set VLLM_SEGREUSE_UNTESTED_VLLM=1 to try it, "
        "or start without segment reuse"
    )


@pytest.mark.parametrize(("value", "accepted"), [("1", True), ("0", False), ("", False)])
def test_31_it_is_accepted_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, value: str, accepted: bool
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    monkeypatch.setenv(UNTESTED_ENV, value)
    if accepted:
        require_supported_vllm()
    else:
        with pytest.raises(UnsupportedVersionError):
            require_supported_vllm()


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.330.0", "1.33.0", "dev"])
def test_31_versions_that_nobody_looked_at_are_refused_whatever_is_set(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setenv(UNTESTED_ENV, "1")
    with pytest.raises(UnsupportedVersionError) as caught:
        require_supported_vllm()
    assert UNTESTED_ENV not in str(caught.value)


@pytest.mark.parametrize(
    "file",
    [it for it in sorted(COMPAT.glob("*.py")) if it.stem not in ("__init__", "patching")],
    ids=lambda file: file.stem,
)
def test_every_patch_was_checked_against_the_versions_that_are_accepted(file: Path) -> None:
    [checked] = [
        ast.literal_eval(node.value)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKED"
    ]
    accepted = {".".join(map(str, version)) for version in (SUPPORTED, *CHECKED)}
    assert accepted <= set(checked)
