# SPDX-License-Identifier: Apache-2.0
"""The command: try settings on the real engine, print what they do, write the server's file."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from segreuse_tools.calibrate import by_policy, by_similarity
from segreuse_tools.calibrate.search import Found, cheapest, halves, judge
from segreuse_tools.calibrate.segmented_prompts import PromptFileError
from segreuse_tools.calibrate.verdict_table import as_yaml, header, name_of, row, table
from segreuse_tools.command_line import add_config, is_one_of, number
from segreuse_tools.estimate.request_log import LogError
from segreuse_tools.model_folder import InputError
from segreuse_tools.terminal import complain, printable
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.options.server import ConfigError

DONE, NOTHING_FOUND, BAD_INPUT = 0, 1, 2
_WAY_OUT = "more prompts narrow the bounds, --max-kl and --min-agreement move them"


def main(arguments: Sequence[str]) -> int:
    """Run `vllm-segreuse calibrate`; returns the exit status: 1 if no setting keeps the bounds."""
    given, engine_arguments = _parse(arguments)
    if not _may_write(given.out):
        complain(
            "calibrate",
            f"cannot write {given.out}: it must be a file in a folder that exists and that this "
            "user may write",
        )
        return BAD_INPUT
    if is_one_of(given.out, [given.prompts]):
        complain("calibrate", f"--out {given.out} would overwrite the prompts: name another file")
        return BAD_INPUT
    try:
        measure = by_similarity.measure if given.similarity else by_policy.measure
        found = measure(given, engine_arguments)
    except (PromptFileError, LogError, ConfigError, InputError, RefusedError) as error:
        complain("calibrate", error)
        return BAD_INPUT
    index = cheapest(found.settings, given.max_kl, given.min_agreement)
    rows = [(name_of(it.options), judge(it.trials)) for it in found.settings]
    print("\n".join(table(rows, index)))
    way_out = _WAY_OUT
    if not given.similarity:
        way_out += ", and --max-drift computes in full what is far off"
    if index is None:
        print(
            f"no setting kept the divergence at most {given.max_kl} and the agreement at least "
            f"{given.min_agreement} on the {len(halves(found.settings[0].trials)[0])} prompts that "
            f"it is chosen by (the table is of all); {way_out}",
            file=sys.stderr,
        )
        return NOTHING_FOUND
    options = found.settings[index].options
    unseen = judge(halves(found.settings[index].trials)[1])
    print(f"  {row('on the prompts it was not chosen by', unseen)}")
    print(found.about(index))
    if given.similarity and "similarity" not in options:
        print(
            "no setting with similar text keeps the bounds and does less work than without it: "
            "nothing is written",
            file=sys.stderr,
        )
        return NOTHING_FOUND
    if not unseen.keeps(given.max_kl, given.min_agreement):
        print(
            "the setting did not keep the bounds on the half that it was not chosen by, and is not "
            f"written; {way_out}",
            file=sys.stderr,
        )
        return NOTHING_FOUND
    return _write(given, found, index)


def _may_write(out: Path) -> bool:
    """Asked before anything is measured, which takes long."""
    if os.path.exists(out):
        return os.path.isfile(out) and os.access(out, os.W_OK)
    return os.access(out.absolute().parent, os.W_OK | os.X_OK)


def _write(given: argparse.Namespace, found: Found, index: int) -> int:
    setting = found.settings[index]
    choosing, checking = halves(setting.trials)
    about = (
        f"By vllm-segreuse calibrate on {printable(given.prompts)} "
        f"({len(setting.trials)} prompts), model {printable(given.model)}.",
        header(),
        row("on the half it was chosen by", judge(choosing)),
        row("on the other half", judge(checking)),
    )
    try:
        given.out.write_text(as_yaml(found.written(setting.options), about), encoding="utf-8")
    except OSError as error:
        complain("calibrate", f"cannot write {given.out}: {error}")
        return BAD_INPUT
    out = printable(given.out)
    print(f"written to {out}: vllm-segreuse serve MODEL --segreuse-config {out}")
    return DONE


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="vllm-segreuse calibrate",
        allow_abbrev=False,  # or --segreuse, which is vLLM's to parse, would be --segreuse-config
        description="Find the cheapest setting that keeps a model's answers to your prompts. "
        "Options that are not listed go to vLLM's engine, as for `vllm serve`.",
        epilog='Lines of the file: {"prefix": TEXT, "segments": [TEXT, ...], "suffix": TEXT}; '
        "with --similarity, a request log as for `vllm-segreuse estimate`.",
    )
    parser.add_argument("model", help="as for `vllm serve`")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, default=Path("segreuse.yaml"), metavar="FILE.yaml")
    parser.add_argument(
        "--similarity",
        action="store_true",
        help="choose how similar segments are found and accepted, instead of a policy",
    )
    add_config(parser, "with --similarity: options that the chosen ones are added to")
    parser.add_argument(
        "--max-kl",
        type=number(float, 0, math.inf),
        default=0.05,
        help="largest mean divergence, in nats (%(default)s)",
    )
    parser.add_argument(
        "--min-agreement",
        type=number(float, 0, 1),
        default=0.9,
        help="least share of prompts with the same first token (%(default)s)",
    )
    parser.add_argument(
        "--max-drift",
        action="store_true",
        help="give each setting a `max_drift`, as large as --target-kl allows",
    )
    parser.add_argument(
        "--target-kl",
        type=number(float, 0, math.inf),
        default=0.1,
        help="what max_drift keeps nine in ten divergences below, in nats (%(default)s)",
    )
    given, others = parser.parse_known_args(arguments)
    if given.min_agreement == 1:
        parser.error(
            "--min-agreement 1 can never be kept: however many prompts agree, that proves a share "
            "below 1; 59 of 59 prove 0.95"
        )
    if given.similarity and given.max_drift:
        parser.error("--max-drift is chosen with a policy: calibrate without --similarity first")
    if given.config and not given.similarity:
        parser.error("--config needs --similarity: a policy is chosen without other options")
    return given, others
