# SPDX-License-Identifier: Apache-2.0
"""What is patched when, in which process, and under which names."""

import importlib
import inspect
import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests.compat.registering import ENGINE
from vllm_segreuse import plugin
from vllm_segreuse.compat import engine_core, openai_streams
from vllm_segreuse.engine.version import UnsupportedVersionError

FLAGS = ["envs", "engine_args"]
FRONT_END = {
    *("input_processor", "renderer", "openai_streams", "openai_protocols"),
    *("async_llm", "api_server", "run_batch", "detokenizer"),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for name in (*FLAGS, *FRONT_END, *ENGINE):
        module = importlib.import_module(f"vllm_segreuse.compat.{name}")
        monkeypatch.setattr(module, "install", lambda *given, name=name: found.append(name))
    monkeypatch.delenv("VLLM_SEGREUSE_ENABLED", raising=False)
    return found


def test_every_process_gets_the_flags_and_nothing_else(installed: list[str]) -> None:
    plugin.register()
    assert installed == FLAGS


def test_children_of_an_enabled_engine_get_the_engines_part(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SEGREUSE_ENABLED", "1")
    plugin.register()
    assert installed[:2] == FLAGS
    assert set(installed[2:]) == ENGINE


def test_who_enables_gets_all_and_tells_its_children(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SEGREUSE_ENABLED", "0")
    plugin.enable()
    assert set(installed) == {"envs"} | FRONT_END | ENGINE
    installed.clear()
    plugin.register()  # as a child that finds the environment does
    assert set(installed[2:]) == ENGINE


def test_31_nothing_is_patched_in_another_version(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with pytest.raises(UnsupportedVersionError):
        plugin.enable()
    assert installed == []
    assert "VLLM_SEGREUSE_ENABLED" not in os.environ


def test_31_nor_in_its_children(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SEGREUSE_ENABLED", "1")
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with pytest.raises(UnsupportedVersionError):
        plugin.register()
    assert installed == FLAGS


def test_api_servers_find_the_methods_under_the_names_that_they_call() -> None:
    from vllm.v1.engine.core import EngineCore

    engine_core.install(lambda model: 0)
    engine_core.install(lambda model: 0)
    calls: list[Any] = []
    answers = {"audits": {"share": 0.5}}

    def call(name: str, *args: Any) -> Any:
        if name not in answers:
            calls.append((name, *args))
        return answers.get(name)

    side = SimpleNamespace(
        set_enabled=lambda state: calls.append(("set_enabled", state)) or state,
        status=lambda: {"indexed_blocks": 3},
        call=call,
    )
    connector = SimpleNamespace(scheduler_side=side)
    core: Any = SimpleNamespace(scheduler=SimpleNamespace(get_kv_connector=lambda: connector))
    ours: Any = EngineCore
    assert ours.segreuse_set_enabled(core, True) is True
    assert ours.segreuse_set_enabled(core, False) is False
    assert ours.segreuse_status(core) == {"indexed_blocks": 3}
    assert ours.segreuse_call(core, "audits") == {"share": 0.5}
    assert ours.segreuse_call(core, "unfreeze", ["a", "b"]) is None
    assert calls == [("set_enabled", True), ("set_enabled", False), ("unfreeze", ["a", "b"])]


def test_both_kinds_of_streams_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[tuple[str, str]] = []
    monkeypatch.setattr(
        openai_streams, "wrap", lambda owner, name, *_: wrapped.append((owner.__name__, name))
    )
    openai_streams.install(lambda *given: None)
    assert wrapped == [
        ("OpenAIServingChat", "chat_completion_stream_generator"),
        ("OpenAIServingCompletion", "completion_stream_generator"),
    ]


@pytest.mark.parametrize(
    ("module", "owner", "names"),
    [
        ("input_processor", "InputProcessor", ["_validate_params", "process_inputs"]),
        ("api_server", "vllm.entrypoints.launchers.app", ["register_api_routers"]),
        (
            "engine_args",
            "EngineArgs",
            ["add_cli_args", "from_cli_args", "create_engine_config"],
        ),
    ],
)
def test_patches_land_where_vllm_calls(
    monkeypatch: pytest.MonkeyPatch, module: str, owner: str, names: list[str]
) -> None:
    wrapped: list[tuple[str, str]] = []
    ours = importlib.import_module(f"vllm_segreuse.compat.{module}")
    monkeypatch.setattr(
        ours, "wrap", lambda where, name, *_: wrapped.append((where.__name__, name))
    )
    ours.install(*[None] * len(inspect.signature(ours.install).parameters))
    assert wrapped == [(owner, name) for name in names]
