# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse`: hands its arguments on to one of `commands/`, and loads no other.

Every command parses with argparse, as vLLM does: `doctor`, `estimate` and `calibrate` pass options
that they do not know on to vLLM's own parser, and `serve` passes all.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import vllm_segreuse
from segreuse_tools.command_line import chosen_command
from vllm_segreuse.engine.version import UnsupportedVersionError

COMMANDS = {
    "serve": "start a server with segment reuse",
    "calibrate": "find the cheapest setting that keeps a model's answers",
    "doctor": "say whether a model will be served with segment reuse here",
    "estimate": "say what a request log would have reused",
    "kb": "create, fill and watch the knowledge bases of a server",
    "explain": "show what a server would reuse of a request, and why not the rest",
}
"""By the names of their modules."""

_USAGE = """\
vllm-segreuse serve MODEL [--segreuse-config FILE.yaml] [options of vllm serve]
       vllm-segreuse serve --help=all
       vllm-segreuse calibrate MODEL --prompts FILE.jsonl [--similarity] [--help]
       vllm-segreuse doctor MODEL [--json] [options of vllm serve]
       vllm-segreuse estimate REQUESTS.jsonl --model MODEL [--help]
       vllm-segreuse estimate TRACE [--cache-tokens SIZES] [--help]
       vllm-segreuse kb create|add|ls|show|rm|warm|stats [--help]
       vllm-segreuse explain REQUEST.json [--url URL] [--help]
       vllm-segreuse --version"""
_ENGINE = ("vllm", "torch")
_CLIENTS = ("kb", "explain")
_EXAMINE = ("doctor", "estimate")
"""They load vLLM into this process, and start no other."""


def run() -> None:
    """`main` in a process of its own, which it ends."""
    ended: list[int] = []
    if sys.argv[1:2] and sys.argv[1] in _EXAMINE:
        # Registered before all others, and so called after them.
        atexit.register(_leave, ended)
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    """Python would search all that vLLM has made for garbage, and free it, which takes seconds."""
    if ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="vllm-segreuse", usage=_USAGE)
    versions = f"vllm-segreuse {vllm_segreuse.__version__} (vLLM {installed_vllm()})"
    parser.add_argument("--version", action="version", version=versions)
    command = chosen_command(parser, COMMANDS, argv)
    try:
        module = importlib.import_module(f"segreuse_tools.commands.{command}")
        return int(module.main(argv[1:]))
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in _ENGINE:
            sys.exit(
                f"vllm-segreuse {command} needs {library}: pip install 'vllm-segreuse[cpu]', or "
                "'vllm-segreuse[cuda]' for a GPU"
            )
        if command in _CLIENTS:
            sys.exit(f"vllm-segreuse {command} needs {library}: pip install 'vllm-segreuse[kb]'")
        raise
    except UnsupportedVersionError as error:
        sys.exit(f"vllm-segreuse: {error}")


def installed_vllm() -> str:
    """The version of the installed vLLM as it names it itself, or that there is none.

    Read from its file: importing vLLM takes seconds.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return "not installed"
    file = Path(package.submodule_search_locations[0]) / "_version.py"
    spec = importlib.util.spec_from_file_location("vllm_version", file)
    if not file.is_file() or spec is None or spec.loader is None:
        return "of an unknown version"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)
