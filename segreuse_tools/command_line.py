# SPDX-License-Identifier: Apache-2.0
"""What the parsers of several commands have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_UNBOUNDED = 1e300
"""Below infinity, which is no size."""


def number(
    kind: Callable[[str], Any], least: float, most: float = _UNBOUNDED
) -> Callable[[str], Any]:
    """An argument's `type`: a number within bounds that are both included.

    Args:
        kind: `int` or `float`.
    """

    def parsed(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            bounds = f"between {least:.15g} and {most:.15g}"
            if most == _UNBOUNDED:
                bounds = f"a number from {least:.15g} on"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    parsed.__name__ = kind.__name__  # argparse names it where the text is no number
    return parsed


def is_one_of(out: Path | None, inputs: Iterable[Path | None]) -> bool:
    """Whether writing a file would replace one that the command reads."""
    if out is None or not os.path.exists(out):
        return False
    return any(os.path.samefile(out, it) for it in inputs if it is not None and os.path.exists(it))


def add_config(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds the option that names a file of the server's options."""
    parser.add_argument("--config", "--segreuse-config", type=Path, metavar="FILE.yaml", help=help)


def chosen_command(
    parser: argparse.ArgumentParser, commands: Mapping[str, str], arguments: Sequence[str]
) -> str:
    """The command that the first argument names; help or an error end the process.

    Args:
        commands: what each does, for the help. They parse the other arguments themselves, so that
            none of them is loaded for another one's.
    """
    listed = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", prog="")
    listed.required = True
    for name, summary in commands.items():
        listed.add_parser(name, help=summary, add_help=False)
    return str(parser.parse_args(arguments[:1]).command)
