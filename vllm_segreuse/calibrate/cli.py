# SPDX-License-Identifier: Apache-2.0
"""The command: read prompts, try settings on the real engine, write the server's YAML file."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm_segreuse.calibrate import drift
from vllm_segreuse.calibrate.measure import LOGPROBS, try_all
from vllm_segreuse.calibrate.prompts import Prompt, PromptError, read_prompts
from vllm_segreuse.calibrate.report import HEADER, LEGEND, about_drift, name_of, row
from vllm_segreuse.calibrate.search import (
    CANDIDATES,
    Setting,
    Verdict,
    choose,
    halves,
    judge,
)

_WAY_OUT = (
    "more prompts narrow the bounds, --max-kl and --min-agreement move them, and --max-drift "
    "computes in full what is far off"
)


def main(arguments: Sequence[str]) -> int:
    """Run `vllm-segreuse calibrate`; returns the exit status: 1 if no setting keeps the bounds."""
    given, engine_arguments = _parse(arguments)
    try:
        llm = _engine(given, engine_arguments)
        prompts = _prompts(given.prompts, llm)
    except PromptError as error:
        print(f"vllm-segreuse calibrate: {error}", file=sys.stderr)
        return 2
    measured = list(map(Setting, CANDIDATES, try_all(llm, prompts)))
    settings = measured
    if given.max_drift:
        settings = [drift.with_max_drift(setting, given.target_kl) for setting in measured]
    chosen = choose(
        [(index, judge(halves(setting.trials)[0])) for index, setting in enumerate(settings)],
        given.max_kl,
        given.min_agreement,
    )
    print(f"{LEGEND}\n  {HEADER}")
    for index, setting in enumerate(settings):
        mark = "*" if chosen is not None and index == chosen[0] else " "
        print(f"{mark} {row(name_of(setting), judge(setting.trials))}")
    if chosen is None:
        print(
            f"no setting kept the divergence at most {given.max_kl} and the agreement at least "
            f"{given.min_agreement} on {len(prompts) // 2} prompts; {_WAY_OUT}",
            file=sys.stderr,
        )
        return 1
    index, by_half = chosen
    unseen = judge(halves(settings[index].trials)[1])
    print(f"  {row('on the prompts it was not chosen by', unseen)}")
    print(about_drift(measured[index].trials, given.target_kl))
    if not unseen.keeps(given.max_kl, given.min_agreement):
        print(
            "the setting did not keep the bounds on the half that it was not chosen by, and is not "
            f"written; {_WAY_OUT}",
            file=sys.stderr,
        )
        return 1
    try:
        given.out.write_text(
            _yaml(settings[index], by_half, unseen, given, len(prompts)), encoding="utf-8"
        )
    except OSError as error:
        print(f"vllm-segreuse calibrate: cannot write {given.out}: {error}", file=sys.stderr)
        return 2
    print(f"written to {given.out}: vllm-segreuse serve MODEL --segreuse-config {given.out}")
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="vllm-segreuse calibrate",
        description="Find the cheapest setting that keeps a model's answers to your prompts. "
        "Options that are not listed go to vLLM's engine, as for `vllm serve`.",
        epilog='Lines of the file: {"prefix": TEXT, "segments": [TEXT, ...], "suffix": TEXT}.',
    )
    parser.add_argument("model", help="as for `vllm serve`")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, default=Path("segreuse.yaml"), metavar="FILE.yaml")
    parser.add_argument(
        "--max-kl",
        type=_number(math.inf),
        default=0.05,
        help="largest mean divergence, in nats (%(default)s)",
    )
    parser.add_argument(
        "--min-agreement",
        type=_number(1.0),
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
        type=_number(math.inf),
        default=0.1,
        help="what max_drift keeps nine in ten divergences below, in nats (%(default)s)",
    )
    return parser.parse_known_args(arguments)


def _number(largest: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not 0 <= value <= largest:
            raise argparse.ArgumentTypeError(f"{text} is not between 0 and {largest:g}")
        return value

    return number


def _engine(given: argparse.Namespace, arguments: list[str]) -> Any:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_segreuse import kv_transfer_config

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-segreuse calibrate"))
    named = EngineArgs.from_cli_args(parser.parse_args(["--model", given.model, *arguments]))
    options = {field.name: getattr(named, field.name) for field in fields(EngineArgs)}
    options["max_logprobs"] = max(LOGPROBS, options["max_logprobs"])
    # Only exact KV donates: what one setting leaves behind must not help the next.
    options["kv_transfer_config"] = kv_transfer_config(max_provenance_depth=0, min_reused_tokens=1)
    return LLM(**options)


def _prompts(file: Path, llm: Any) -> list[Prompt]:
    tokenizer = llm.get_tokenizer()
    start = tokenizer("", add_special_tokens=True)["input_ids"][:1]
    return read_prompts(
        file,
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        start[0] if start else None,
    )


def _yaml(
    setting: Setting, chosen: Verdict, unseen: Verdict, given: argparse.Namespace, count: int
) -> str:
    import yaml

    head = (
        f"# By vllm-segreuse calibrate on {given.prompts} ({count} prompts), model {given.model}.\n"
        f"# {HEADER}\n"
        f"# {row('on the half it was chosen by', chosen)}\n"
        f"# {row('on the other half', unseen)}\n"
    )
    return head + yaml.safe_dump(dict(setting.options), sort_keys=False)
