# SPDX-License-Identifier: Apache-2.0
"""`python -m bench trace --trace FILE`: what a trace of ids would gain, by estimate and by engine.

A slice of the trace goes through real servers over HTTP: prefix caching alone, and the plugin with
each policy, by turns. Token ids stand for the trace's parts, so answers mean nothing; times do not
depend on them. `--requests 0` asks no engine. The whole trace is estimated in any case.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import openai

from bench import harness, shapes
from bench.engine import BLOCK_TOKENS
from bench.english.command import UsageError, require_model
from bench.server import ServerError
from bench.trace import estimating, figures, serving
from bench.trace.serving import Load, Turn
from bench.trace.slices import Slice
from segreuse_tools.command_line import number
from segreuse_tools.estimate.gain import SizeRow
from segreuse_tools.estimate.light_options import CACHE_TOKENS, sizes
from vllm_segreuse.options.request import RECOMMENDED
from vllm_segreuse.policies import POLICIES

SHAPE = "bench28"


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status: 2 for bad input, 130 if it was interrupted."""
    args = _parser().parse_args(argv)
    try:
        if args.model is None:
            args.model = shapes.make_model(SHAPE)
        require_model(args.model)
        return run(args)
    except UsageError as error:
        print(f"bench trace: {error}", file=sys.stderr)
        return 2
    except (harness.BenchError, ServerError, openai.OpenAIError, httpx.HTTPError) as error:
        print(f"bench trace: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    """Measure, and report on what was measured.

    Raises:
        BenchError: the trace cannot be read, or a server does not report what it should.
        ServerError: a server does not start.
    """
    config = json.loads((args.model / "config.json").read_text())
    where = harness.environment() | {"trace": args.trace.resolve().name}
    turns: list[Turn] = []
    estimated: dict[str, SizeRow] = {}
    if args.requests:
        which = Slice(
            start=args.start,
            count=args.requests,
            token_scale=args.token_scale,
            most_answer_tokens=args.answer_tokens,
            vocabulary=config["vocab_size"],
        )
        load = Load(args.cache_tokens // BLOCK_TOKENS, args.turn, args.quicker)
        where |= {"model": args.model.resolve().name, **asdict(which), **asdict(load)}
        where |= {"block_tokens": BLOCK_TOKENS, "concurrency": serving.CONCURRENCY}
        prompts = which.prompts(args.trace)
        layers = config["num_hidden_layers"]
        for policy in args.policies:
            at = load.blocks, BLOCK_TOKENS, layers
            estimated[policy] = estimating.of_slice(prompts, policy, *at)
    found = estimating.of_whole(args.trace, args.cache_sizes, tuple(args.policies))
    where |= dict(zip(("format", "all_requests", "all_prompt_tokens"), found, strict=False))
    where["interrupted"] = False
    if args.requests:
        try:
            for turn in serving.replayed(args.model, args.policies, prompts, load):
                turns.append(turn)
        except KeyboardInterrupt:
            print("interrupted: figures are of what was measured", file=sys.stderr)
            where["interrupted"] = True
    result = figures.result_of(turns, estimated, found[-1])
    harness.report("trace", where, result)
    if args.json:
        result["rows"] += map(_plain, turns)
        harness.write_json(args.json, "trace", where, result)
    return 130 if where["interrupted"] else 0


def _plain(turn: Turn) -> dict[str, Any]:
    ttft_s = [round(seconds, 4) for seconds in turn.ttft_s]
    return {"of": "turn", **asdict(turn), "seconds": round(turn.seconds, 4), "ttft_s": ttft_s}


def _policies(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in POLICIES or name == "exact"]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no policy that finds text by content")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench trace", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="a file or a folder")
    parser.add_argument(
        "--model", type=Path, help=f"folder of a model (random weights, the shape {SHAPE})"
    )
    parser.add_argument(
        "--requests", type=number(int, 0), default=320, help="of the slice (%(default)s)"
    )
    parser.add_argument(
        "--start", type=number(int, 0), default=0, help="requests in front of it (%(default)s)"
    )
    parser.add_argument(
        "--token-scale",
        type=number(float, 0.01, 1),
        default=1.0,
        help="tokens of a part, of those in the trace (%(default)s)",
    )
    parser.add_argument(
        "--answer-tokens", type=number(int, 1), default=4, help="at most (%(default)s)"
    )
    parser.add_argument(
        "--cache-tokens",
        type=number(int, BLOCK_TOKENS),
        default=100_000,
        help="of each server's KV cache (%(default)s)",
    )
    parser.add_argument(
        "--quicker",
        type=number(float, 0.001),
        default=40.0,
        help="how many times as quickly as in the trace requests are sent (%(default)s)",
    )
    parser.add_argument(
        "--turn", type=number(int, 1), default=20, help="prompts of an arm's turn (%(default)s)"
    )
    parser.add_argument(
        "--policies",
        type=_policies,
        default=[RECOMMENDED, "shift"],
        help=f"the summary is of the first ({RECOMMENDED},shift)",
    )
    parser.add_argument(
        "--cache-sizes",
        type=sizes,
        default=sizes(",".join(CACHE_TOKENS)),
        help=f"of the estimate of the whole trace, in tokens ({','.join(CACHE_TOKENS)})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it here")
    return parser
