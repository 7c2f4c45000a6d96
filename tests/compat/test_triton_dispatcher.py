# SPDX-License-Identifier: Apache-2.0
"""vLLM's search for kernels does not see llvmlite, and everybody else still does."""

import sys
from typing import Any

import pytest

from vllm_segreuse.compat.triton_dispatcher import _rebind_kernels, install


@pytest.fixture
def loaded() -> dict[str, Any]:
    import llvmlite.binding  # noqa: F401

    return {name: module for name, module in sys.modules.items() if name.startswith("llvmlite")}


def test_llvmlite_is_hidden_during_the_search_only(loaded: dict[str, Any]) -> None:
    def search(*given: Any, **named: Any) -> Any:
        assert not any(name.startswith("llvmlite") for name in sys.modules)
        assert "torch" in sys.modules
        return given, named

    assert _rebind_kernels(search)(1, kernel=2) == ((1,), {"kernel": 2})
    assert {name: sys.modules.get(name) for name in loaded} == loaded


def test_a_search_that_fails_hides_nothing_for_good(loaded: dict[str, Any]) -> None:
    def search() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        _rebind_kernels(search)()
    assert {name: sys.modules.get(name) for name in loaded} == loaded


def test_vllms_own_search_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.triton_utils import dispatcher

    monkeypatch.setattr(dispatcher, "_rebind_kernels", lambda *_: "searched")
    install()
    install()
    wrapped: Any = dispatcher._rebind_kernels
    assert wrapped() == wrapped.__wrapped__() == "searched"
    assert not hasattr(wrapped.__wrapped__, "__wrapped__"), "once"
