# SPDX-License-Identifier: Apache-2.0
"""The command: read the log, replay it, print. Exit status: 0 done, 1 refused, 2 bad input."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from segreuse_tools.command_line import add_config, number
from segreuse_tools.engine_loading import is_installed, not_searched_for_garbage, quiet
from segreuse_tools.estimate import light_options
from segreuse_tools.estimate.light_options import chosen
from segreuse_tools.estimate.request_log import LeftOut, LogError, Logged, read_log
from segreuse_tools.estimate.traces.formats import Format
from segreuse_tools.estimate.traces.reading import find_format
from segreuse_tools.model_folder import InputError
from segreuse_tools.terminal import complain, print_all
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.options.request import AUTO, RECOMMENDED
from vllm_segreuse.options.server import ConfigError
from vllm_segreuse.policies import POLICIES

if TYPE_CHECKING:
    from segreuse_tools.estimate.comparison import Estimate

DONE, REFUSED, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Run `vllm-segreuse estimate`; returns the exit status."""
    given, engine_arguments = _parse(arguments)
    quiet()
    try:
        found = find_format(given.requests)
        if found not in (None, Format.BODIES) or given.without_engine or not is_installed():
            _check(given, light_options.ONLY_WITH_ENGINE, "needs vLLM and a log of texts")
            return _estimate_without_engine(given, engine_arguments, found)
        _check(given, light_options.ONLY_WITHOUT, "is for traces of ids, or --without-engine")
        return _estimate(given, engine_arguments)
    except RefusedError as error:
        for reason in error.reasons:
            complain("estimate", f"{given.model} is refused: {reason}")
        return REFUSED
    except (LogError, InputError, ConfigError) as error:
        complain("estimate", error)
        return BAD_INPUT
    finally:
        gc.unfreeze()


def _estimate_without_engine(
    given: argparse.Namespace, engine_arguments: list[str], found: Format | None
) -> int:
    from segreuse_tools.estimate import without_engine

    if engine_arguments:
        raise InputError(
            f"unknown arguments: {' '.join(engine_arguments)} (those of vLLM mean nothing without "
            "its engine)"
        )
    without_engine.run(given, found)
    return DONE


def _check(given: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Options that would have no effect are refused."""
    for name in names:
        if getattr(given, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} {why}")


def _estimate(given: argparse.Namespace, engine_arguments: list[str]) -> int:
    if given.model is None:
        raise InputError(
            f"{given.requests} is no trace of ids: name a model for its texts (--model)"
        )
    of_file = None if given.config is None else SegReuseConfig.from_yaml(given.config)
    left_out = LeftOut(given.strict)
    log = _ordered(read_log(given.requests, left_out), given.tokens_per_second is not None)
    log = log[chosen(given)]
    if not log:
        raise LogError(f"{given.requests} has no request behind the first {given.start:,}")
    found, default = _estimated(given, engine_arguments, of_file, log, left_out)
    from segreuse_tools.estimate.estimate_text import as_text

    print_all(json.dumps(found.as_json(), indent=2) if given.json else as_text(found, default))
    return DONE


def _estimated(
    given: argparse.Namespace,
    engine_arguments: list[str],
    of_file: SegReuseConfig | None,
    log: list[Logged],
    left_out: LeftOut,
) -> tuple[Estimate, str]:
    """What the log comes to, and the server's policy."""
    # Imported here: they load vLLM, which takes seconds, and bad input is reported before.
    with not_searched_for_garbage():
        from segreuse_tools.estimate.comparison import cache_of, estimate
        from segreuse_tools.estimate.prompt_rendering import Renderer
        from segreuse_tools.estimate.replay import Pace
        from segreuse_tools.estimate.served_model import load_model

        model = load_model("estimate", given.model, engine_arguments, of_file)
    options = model.options
    asked = Renderer(
        model.vllm_config, model.args, given.extra_keys, given.answer_tokens, options, left_out
    ).render(log)
    if not asked:
        whys = "; ".join(str(each) for each in left_out.reasons)
        raise LogError(f"{given.requests} holds nothing that can be replayed: {whys}")
    cache = cache_of(model, asked, given.block_size, given.num_blocks, given.kv_gib)
    step_tokens = model.vllm_config.scheduler_config.max_num_batched_tokens
    step_work = options.spread_work(step_tokens, model.layers.in_all)
    pace = Pace(model.layers, step_work or 0, given.concurrency or 1, given.tokens_per_second)
    named = dict.fromkeys(RECOMMENDED if name == AUTO else name for name in given.policy)
    policies = [*(named or POLICIES)]
    found = estimate(model, asked, options, policies, cache, pace, left_out.reasons)
    return found, options.policy


def _ordered(log: list[Logged], timed: bool) -> list[Logged]:
    """By their times, counted from the first, if they matter; else as they are in the file."""
    if not timed:
        return log

    def time_of(logged: Logged) -> float:
        if logged.time_s is None:
            raise LogError(f"{logged.where} has no timestamp, which --tokens-per-second needs")
        return logged.time_s

    first = min(map(time_of, log))
    return [replace(logged, time_s=time_of(logged) - first) for logged in sorted(log, key=time_of)]


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="vllm-segreuse estimate",
        allow_abbrev=False,  # or --segreuse, which is vLLM's to parse, would be --segreuse-config
        description="Say what a request log would have reused: with prefix caching alone, and with "
        "segments by policy. Prompts go through the model's chat template, its tokenizer and "
        "vLLM's own scheduler; nothing is computed, so that neither weights nor a GPU are "
        "needed. Options that are not listed go to vLLM, as for `vllm serve`. Nothing is "
        "downloaded. Traces of ids in place of texts (RAGPulse, WEKA, Mooncake, timed_trace) need "
        "neither a model nor vLLM.",
        epilog="Exit status: 0 done; 1 the model is refused, with the reasons; 2 bad input.",
    )
    parser.add_argument(
        "requests",
        type=Path,
        metavar="REQUESTS.jsonl",
        help="a body of /v1/completions or /v1/chat/completions in each line, or an object with it "
        'as "body"; "extra_keys", "timestamp" and "answer" may stand beside it. Or a trace of ids: '
        "its file, or its folder",
    )
    parser.add_argument(
        "--model", help="folder with config.json and tokenizer, or a cached name; for texts"
    )
    add_config(parser, "options of segment reuse, as for `vllm-segreuse serve --segreuse-config`")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        choices=[AUTO, *POLICIES],
        help="one of those to compare; may be repeated (all)",
    )
    parser.add_argument(
        "--extra-keys",
        action="append",
        default=[],
        metavar="KEY",
        help="of requests that name none; repeated: a composite one (none: nothing is looked up)",
    )
    _add_engine(parser)
    _add_slice(parser)
    light_options.add_options(parser)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="end at the first line that a server would refuse (it is left out, and named)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_known_args(arguments)


def _add_slice(parser: argparse.ArgumentParser) -> None:
    """Which requests of the log are replayed."""
    group = parser.add_argument_group("a slice of the log, in the order of its replay")
    group.add_argument(
        "--start",
        type=number(int, 0),
        default=0,
        metavar="K",
        help="skip the first K requests; all caches are empty behind them (%(default)s)",
    )
    group.add_argument(
        "--requests",
        dest="count",
        type=number(int, 1),
        metavar="N",
        help="replay N requests at most (all)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Memory of the engine that the log is replayed in, and when requests arrive."""
    parser.add_argument(
        "--block-size",
        type=number(int, 1),
        default=16,
        help="tokens per KV block (%(default)s, as vLLM's on GPUs)",
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--num-blocks", type=number(int, 2), metavar="N", help="KV blocks (all that is needed)"
    )
    memory.add_argument(
        "--kv-gib", type=number(float, 0), metavar="GIB", help="KV cache of one device"
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--concurrency",
        type=number(int, 1),
        metavar="N",
        help="requests at a time; the next arrives when one has ended (1)",
    )
    order.add_argument(
        "--tokens-per-second",
        type=number(float, 1),
        metavar="N",
        help="requests arrive at their timestamps, and the engine computes N tokens in a second",
    )
    parser.add_argument(
        "--answer-tokens",
        type=number(int, 1),
        default=128,
        metavar="N",
        help="most tokens of answers that were not logged (%(default)s)",
    )
