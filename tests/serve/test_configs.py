# SPDX-License-Identifier: Apache-2.0
"""The configurations that ship with the package can be loaded, and say what they are for."""

from pathlib import Path

import pytest

from vllm_segreuse.config import SegReuseConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_there_is_one_per_use() -> None:
    names = {path.stem for path in CONFIGS}
    assert {"rag", "chat", "agents", "faithful", "fastest"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads_and_shows_its_command(path: Path) -> None:
    config = SegReuseConfig.from_yaml(path)
    assert config.model_fields_set, "a configuration that sets nothing is no configuration"
    assert f"configs/{path.name}" in path.read_text()
