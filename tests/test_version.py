# SPDX-License-Identifier: Apache-2.0
"""Only tested versions of vLLM are accepted."""

import pytest
import vllm

from vllm_segreuse.version import UnsupportedVersionError, require_supported_vllm


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
