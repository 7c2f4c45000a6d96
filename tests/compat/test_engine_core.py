# SPDX-License-Identifier: Apache-2.0
"""The kill switch reaches the scheduler's half of the connector, and only of ours."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_segreuse.compat.engine_core import segreuse_set_enabled, segreuse_status


class Side:
    def __init__(self) -> None:
        self.enabled = True

    def set_enabled(self, enabled: bool) -> bool:
        self.enabled = enabled
        return self.enabled

    def status(self) -> dict[str, Any]:
        return {"enabled": self.enabled}


def core(connector: Any) -> Any:
    return SimpleNamespace(scheduler=SimpleNamespace(get_kv_connector=lambda: connector))


def test_switch() -> None:
    side = Side()
    ours = core(SimpleNamespace(scheduler_side=side))
    assert segreuse_set_enabled(ours, False) is False
    assert side.enabled is False
    assert segreuse_status(ours) == {"enabled": False}


@pytest.mark.parametrize("connector", [None, object()])
def test_engine_without_our_connector_says_so(connector: Any) -> None:
    with pytest.raises(RuntimeError, match="does not run segment reuse"):
        segreuse_status(core(connector))
