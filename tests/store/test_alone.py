# SPDX-License-Identifier: Apache-2.0
"""Anybody can use the store: it needs nothing of the plugin, and of vLLM nothing but a shape."""

import inspect
import subprocess
import sys

from vllm.v1.kv_offload.tiering.base import JobResult as OfVllm
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from segreuse_store import FileStore, JobResult


def test_no_module_of_it_loads_the_plugin_torch_or_vllm() -> None:
    code = """
import importlib, pkgutil, sys, segreuse_store
for module in pkgutil.walk_packages(segreuse_store.__path__, "segreuse_store."):
    importlib.import_module(module.name)
print(*[it for it in ("vllm_segreuse", "segreuse_tools", "torch", "vllm") if it in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_it_answers_what_vllm_asks_of_a_secondary_tier() -> None:
    """But for what is of one request, and what a tier of vLLM's may leave out."""
    asked = {name for name, it in vars(SecondaryTierManager).items() if inspect.isfunction(it)}
    of_a_request = {"on_new_request", "on_request_finished", "serve_external_requests"}
    may_be_left_out = {"on_schedule_end", "get_stats"}
    assert {
        name
        for name in asked - of_a_request - may_be_left_out
        if not name.startswith("_") and not callable(getattr(FileStore, name, None))
    } == set()
    assert {*JobResult._fields} <= {*OfVllm.__dataclass_fields__}
