# SPDX-License-Identifier: Apache-2.0
"""Help, versions and the clients of a server need neither vLLM nor torch, and load neither."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = ("vllm", "torch", "numba")
OF_ENGINE = (
    "segreuse_tools.doctor.trial",
    "segreuse_tools.estimate.modelless_engine",
    "segreuse_tools.estimate.prompt_rendering",
)
"""They run a model's layers, and are made of vLLM's scheduler, and of its renderer."""

LISTED = f"""
import atexit, json, sys
atexit.register(lambda: print(json.dumps([it for it in {ENGINE} if it in sys.modules])))
"""
"""Prints, as its last line, which of the engine's libraries a program has loaded."""

BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({ENGINE}))"
"""A machine on which no engine is installed."""

COMMAND = """
import sys
from segreuse_tools.cli import main
sys.exit(main())
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["kb", "--help"],
        ["kb", "add", "--help"],
        ["explain", "--help"],
        ["doctor", "--help"],
        ["estimate", "--help"],
        ["calibrate", "--help"],
    ],
    ids=" ".join,
)
def test_help_and_versions_load_no_engine(arguments: list[str]) -> None:
    done = run(LISTED + COMMAND, *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("arguments", [["--help"], ["kb", "--help"], ["explain", "--help"]])
def test_help_needs_no_engine(arguments: list[str]) -> None:
    done = run(BLOCKED + COMMAND, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: vllm-segreuse ")


def test_the_version_says_that_there_is_no_engine() -> None:
    done = run(BLOCKED + COMMAND, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" (vLLM not installed)\n")


def test_what_needs_an_engine_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    done = run(BLOCKED + COMMAND, "doctor", str(tmp_path))
    assert done.returncode == 1
    assert "vllm-segreuse doctor needs vllm: pip install 'vllm-segreuse[cpu]'" in done.stderr


def test_the_client_of_knowledge_bases_needs_no_engine() -> None:
    listing = ["kb", "ls", "--url", "http://127.0.0.1:9", "--token", "t"]
    done = run(BLOCKED + COMMAND, *listing)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("vllm-segreuse kb: http://127.0.0.1:9 cannot be reached: ")


def test_the_client_of_explanations_needs_no_engine(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"prompt": "a", "extra_keys": ["docs"]}))
    done = run(BLOCKED + COMMAND, "explain", str(file), "--url", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("vllm-segreuse explain: cannot reach http://127.0.0.1:9")


def test_importing_the_tools_needs_no_engine() -> None:
    program = """
import importlib, pkgutil, sys, segreuse_tools
sys.modules.update(vllm=None, torch=None)
for module in pkgutil.walk_packages(segreuse_tools.__path__, "segreuse_tools."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError:
        print(module.name)
"""
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")
    assert {*done.stdout.split()} <= {*OF_ENGINE}
