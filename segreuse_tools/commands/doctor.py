# SPDX-License-Identifier: Apache-2.0
"""The command: read the arguments, examine, print. Exit status: 0 works, 1 refused, 2 bad input."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from segreuse_tools.command_line import add_config
from segreuse_tools.engine_loading import not_searched_for_garbage, quiet
from segreuse_tools.model_folder import InputError, find_model, read_config
from segreuse_tools.terminal import complain, print_all
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.server import ConfigError

if TYPE_CHECKING:
    from segreuse_tools.doctor.diagnosis import Diagnosis

WORKS, REFUSED, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Run `vllm-segreuse doctor`; returns the exit status."""
    given, engine_arguments = _parse(arguments)
    quiet()
    try:
        folder = find_model(given.model, given.revision)
        if not any(it.replace("_", "-").startswith("--hf-o") for it in engine_arguments):
            read_config(folder)  # before vLLM is loaded, which takes seconds
        of_file = None if given.config is None else SegReuseConfig.from_yaml(given.config)
        with not_searched_for_garbage():
            diagnosis = _diagnosed(given, engine_arguments, of_file)
    except (InputError, ConfigError) as error:
        complain("doctor", error)
        return BAD_INPUT
    finally:
        gc.unfreeze()
    from segreuse_tools.doctor.diagnosis_text import as_text

    print_all(json.dumps(diagnosis.as_json(), indent=2) if given.json else as_text(diagnosis))
    return WORKS if diagnosis.works else REFUSED


def _diagnosed(
    given: argparse.Namespace, engine_arguments: list[str], of_file: SegReuseConfig | None
) -> Diagnosis:
    from vllm.engine.arg_utils import EngineArgs

    from segreuse_tools.doctor.diagnosis import diagnose
    from segreuse_tools.server_arguments import options_of, server_arguments

    # Offline, vLLM puts the cached folder for the name at once, so that it needs the revision.
    of_revision = [] if given.revision is None else ["--revision", given.revision]
    args = server_arguments("doctor", given.model, [*of_revision, *engine_arguments])
    options = options_of(args, of_file)
    return diagnose(EngineArgs.from_cli_args(args), options)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="vllm-segreuse doctor",
        allow_abbrev=False,  # or --segreuse, which is vLLM's to parse, would be --segreuse-config
        description="Say from config.json alone whether a model will be served with segment reuse "
        "on this machine, with which kernels, and what memory it takes. Options that are not "
        "listed go to vLLM, as for `vllm serve`. Nothing is downloaded.",
        epilog="Exit status: 0 it will work; 1 it is refused, with the reasons; 2 bad input.",
    )
    parser.add_argument("model", help="folder with config.json, or a name in the local HF cache")
    parser.add_argument(
        "--revision", help="branch, tag or commit of a cached model, as vLLM's (main)"
    )
    add_config(parser, "options of segment reuse, as for `vllm-segreuse serve --segreuse-config`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_known_args(arguments)
