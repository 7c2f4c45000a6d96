# SPDX-License-Identifier: Apache-2.0
"""The command: read prompts, try settings on the real engine, write the server's YAML file."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm_segreuse.calibrate.prompts import Prompt, PromptError, contexts, read_prompts
from vllm_segreuse.calibrate.search import (
    CANDIDATES,
    Options,
    Trial,
    Verdict,
    choose,
    divergence,
    halves,
    judge,
    most_likely,
)

LOGPROBS = 128
"""Most likely first tokens that are compared; all of them where the vocabulary is smaller."""

_WAY_OUT = "more prompts narrow the bounds, and --max-kl and --min-agreement move them"


def main(arguments: Sequence[str]) -> int:
    """Run `vllm-segreuse calibrate`; returns the exit status: 1 if no setting keeps the bounds."""
    given, engine_arguments = _parse(arguments)
    try:
        llm = _engine(given, engine_arguments)
        prompts = _prompts(given.prompts, llm)
    except PromptError as error:
        print(f"vllm-segreuse calibrate: {error}", file=sys.stderr)
        return 2
    trials = _try_all(llm, prompts)
    chosen = choose(
        [
            (options, judge(halves(made)[0]))
            for options, made in zip(CANDIDATES, trials, strict=True)
        ],
        given.max_kl,
        given.min_agreement,
    )
    for options, made in zip(CANDIDATES, trials, strict=True):
        mark = "*" if chosen is not None and options is chosen[0] else " "
        print(f"{mark} {_line(options)}: {_figures(judge(made))}")
    if chosen is None:
        print(
            f"no setting kept the divergence at most {given.max_kl} and the agreement at least "
            f"{given.min_agreement} on {len(prompts) // 2} prompts; {_WAY_OUT}",
            file=sys.stderr,
        )
        return 1
    options = chosen[0]
    unseen = judge(halves(trials[CANDIDATES.index(options)])[1])
    print(f"on the prompts it was not chosen by: {_figures(unseen)}")
    if not unseen.keeps(given.max_kl, given.min_agreement):
        print(
            "the setting did not keep the bounds on the half that it was not chosen by, and is not "
            f"written; {_WAY_OUT}",
            file=sys.stderr,
        )
        return 1
    try:
        given.out.write_text(
            _yaml(options, chosen[1], unseen, given, len(prompts)), encoding="utf-8"
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


def _try_all(llm: Any, prompts: Sequence[Prompt]) -> list[list[Trial]]:
    """Trials of each candidate, in the order of the prompts."""
    from tqdm import tqdm

    trials: list[list[Trial]] = [[] for _ in CANDIDATES]
    for index, prompt in enumerate(tqdm(prompts, desc="prompts", disable=None)):
        namespace = {"extra_keys": [f"calibration {index}"]}
        for context in contexts(prompts, index):
            _first_token(llm, context, namespace)
        reusing = [
            _first_token(
                llm,
                prompt.token_ids,
                namespace | {f"segreuse_{key}": value for key, value in options.items()},
            )
            for options in CANDIDATES
        ]
        # In full last: its blocks are exact, and vLLM's own prefix cache would find them.
        full, _ = _first_token(llm, prompt.token_ids, None)
        for made, (other, work) in zip(trials, reusing, strict=True):
            made.append(
                Trial(divergence(full, other), most_likely(full) == most_likely(other), work)
            )
        llm.reset_prefix_cache()
    return trials


def _first_token(
    llm: Any, prompt: list[int], extra_args: Mapping[str, Any] | None
) -> tuple[dict[int, float], float]:
    """Log-probabilities of the first token, and the share of the work that was done for it."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=min(LOGPROBS, vocabulary),
        extra_args=dict(extra_args) if extra_args else None,
    )
    [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    report = (output.kv_transfer_params or {}).get("segreuse", {})
    [first] = output.outputs[0].logprobs
    logprobs = {token: entry.logprob for token, entry in first.items()}
    return logprobs, report.get("computed_share", 1.0)


def _line(options: Options) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


def _figures(verdict: Verdict) -> str:
    return (
        f"work {verdict.work:.3f}, divergence {verdict.divergence:.4f} "
        f"(at most {verdict.divergence_at_most:.4f}), agreement {verdict.agreement:.3f} "
        f"(at least {verdict.agreement_at_least:.3f})"
    )


def _yaml(
    options: Options, chosen: Verdict, unseen: Verdict, given: argparse.Namespace, count: int
) -> str:
    import yaml

    head = (
        f"# By vllm-segreuse calibrate on {given.prompts} ({count} prompts), model {given.model}.\n"
        f"# Chosen by half of them: {_figures(chosen)}.\n"
        f"# On the other half: {_figures(unseen)}.\n"
    )
    return head + yaml.safe_dump(dict(options), sort_keys=False)
