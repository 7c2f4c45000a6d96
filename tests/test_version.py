# SPDX-License-Identifier: Apache-2.0
"""Only versions of vLLM that the suites ran on are accepted."""

import pytest
import vllm

from vllm_segreuse.engine.version import UnsupportedVersionError, require_supported_vllm


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.7", "0.32.1rc1", "0.32.0+cpu", "0.33.0", "0.33.2.dev1+gabc"]
)
def test_supported(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    require_supported_vllm()


@pytest.mark.parametrize(
    "version", ["0.31.9", "0.34.0", "0.34.0rc1", "0.3.2", "0.330.0", "1.32.0", "1.33.0", "dev"]
)
def test_other_versions_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UnsupportedVersionError) as caught:
        require_supported_vllm()
    assert str(caught.value) == (
        f"vllm-segreuse supports vLLM 0.32.x or 0.33.x and found {version}: install vLLM 0.32.x or "
        "0.33.x, or start without segment reuse"
    )
