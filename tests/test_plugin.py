# SPDX-License-Identifier: Apache-2.0
"""Installed but not enabled: vLLM is what it was, but for the flags. Enabled: children know."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# These run in processes of their own: other tests enable segment reuse in this one.
SNAPSHOT = """
import importlib, inspect, json, sys

for name in [
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.metrics.loggers",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.gpu_worker",
]:
    importlib.import_module(name)


def snapshot():
    '''Identity of all that vLLM's modules and classes hold, and the content of their dicts.'''
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm.") or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = id(value)
            if type(value) is dict:
                found[f"{name}.{key}[]"] = [(id(k), id(v)) for k, v in value.items()]
            elif inspect.isclass(value) and value.__module__ == name:
                for attribute, member in vars(value).items():
                    found[f"{name}.{key}.{attribute}"] = id(member)
    return found


from vllm_segreuse.plugin import register

before = snapshot()
register()
register()
after = snapshot()
changed = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
appeared = sorted(after.keys() - before.keys())
print(json.dumps({"size": len(before), "changed": changed, "appeared": appeared}))
"""

CHILD = """
import json, sys
from vllm.platforms import current_platform
type(current_platform).is_cpu = lambda self: False
from vllm_segreuse.plugin import register

register()
loaded = "vllm.v1.worker.gpu_model_runner" in sys.modules
of_cpus = [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")]
from vllm.v1.engine.core import EngineCore
switch = hasattr(EngineCore, "segreuse_set_enabled")
print(json.dumps({"switch": switch, "runner": loaded, "of_cpus": of_cpus}))
"""
"""On a GPU; modules of CPUs replace streams, events and pinned memory in torch when imported."""


def run(script: str, **env: str) -> Any:
    # A variable of ours that is set is made known to vLLM: the caller's must not count.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_SEGREUSE_")}
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**inherited, "VLLM_LOGGING_LEVEL": "ERROR", **env},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_33_installed_but_not_enabled_changes_only_the_arguments() -> None:
    difference = run(SNAPSHOT)
    assert difference["size"] > 10_000, "the snapshot has to see vLLM"
    engine_args = "vllm.engine.arg_utils.EngineArgs"
    assert difference["changed"] == [
        f"{engine_args}.add_cli_args",
        f"{engine_args}.create_engine_config",
        f"{engine_args}.from_cli_args",
    ]
    assert difference["appeared"] == []


@pytest.mark.parametrize(
    "enabled",
    # The snapshot above is taken where nobody has enabled it, too.
    [True, pytest.param(False, marks=pytest.mark.slow)],
)
def test_33_engine_processes_are_patched_only_below_an_enabled_parent(enabled: bool) -> None:
    child = run(CHILD, VLLM_SEGREUSE_ENABLED="1" if enabled else "0")
    assert child == {"switch": enabled, "runner": enabled, "of_cpus": []}
