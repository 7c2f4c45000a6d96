# SPDX-License-Identifier: Apache-2.0
"""Options of the estimate without an engine, and what they come to."""

from __future__ import annotations

import argparse
from pathlib import Path

from segreuse_tools.command_line import number

CACHE_TOKENS = ("100K", "300K", "1M", "unlimited")
UNLIMITED = "unlimited"
_UNITS = {"": 1, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000}

ONLY_WITH_ENGINE = ("num_blocks", "kv_gib", "concurrency", "tokens_per_second")
ONLY_WITHOUT = (
    *("cache_tokens", "tier_tokens", "engines", "router", "trace_block_size", "layers", "plot"),
    *("write", "write_block_size"),
    *("prefill_tokens_per_second", "attention_pairs_per_second", "speed"),
)


def chosen(given: argparse.Namespace) -> slice:
    """Which requests of the log are replayed, by `--start` and `--requests`."""
    return slice(given.start, None if given.count is None else given.start + given.count)


def sizes(text: str) -> tuple[int | None, ...]:
    """An argument's `type`: sizes of caches, as "100K,1M,unlimited"; ascending, None: no limit."""
    found = {_tokens(part.strip()) for part in text.split(",")}
    return tuple(sorted(found, key=lambda it: (it is None, it or 0)))


def _tokens(text: str) -> int | None:
    if text == UNLIMITED:
        return None
    unit = text[-1:].upper() if text[-1:].upper() in _UNITS else ""
    try:
        tokens = round(float(text[: len(text) - len(unit)].replace("_", "")) * _UNITS[unit])
    except (ValueError, OverflowError):
        tokens = 0
    if not 16 <= tokens <= 1 << 28:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens from 16 to 2**28, such as 300K or 1M, nor {UNLIMITED}"
        )
    return tokens


def _one_size(text: str) -> int:
    found = _tokens(text)
    if found is None:
        raise argparse.ArgumentTypeError("the tier needs a number of tokens")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """All of them; those that are not given are None."""
    group = parser.add_argument_group(
        "without an engine (traces of ids; bodies where vLLM is not installed)"
    )
    group.add_argument(
        "--without-engine",
        action="store_true",
        help="bodies too, with vLLM installed: the tokenizer's own chat template, no scheduler",
    )
    group.add_argument(
        "--cache-tokens",
        type=sizes,
        metavar="SIZES",
        help=f"tokens of KV that a cache holds ({','.join(CACHE_TOKENS)})",
    )
    group.add_argument(
        "--tier-tokens",
        type=_one_size,
        metavar="N",
        help="that host memory and disks hold behind each cache; found there counts apart (none)",
    )
    group.add_argument(
        "--engines", type=number(int, 1, 1024), metavar="N", help="each with a cache of its own (1)"
    )
    group.add_argument(
        "--router",
        choices=["session", "documents"],
        help="what chooses the engine: the session, or the smallest hash of a document (session)",
    )
    group.add_argument("--layers", type=number(int, 2, 4096), metavar="N", help="of the model (32)")
    group.add_argument(
        "--trace-block-size",
        type=number(int, 1),
        metavar="N",
        help="tokens of a block of hash_ids (as the lines tell)",
    )
    _add_device(group)
    group.add_argument(
        "--write",
        type=Path,
        metavar="FILE.jsonl",
        help="also write what is replayed as hash ids, for `vllm bench serve` and AIPerf",
    )
    group.add_argument(
        "--write-block-size",
        type=number(int, 1),
        metavar="N",
        help="tokens of an id that is written; parts are rounded to whole ones (16)",
    )
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw the table")


def _add_device(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill-tokens-per-second",
        type=number(float, 1),
        metavar="N",
        help="of the device with the model, for short prompts: adds times of the first token",
    )
    group.add_argument(
        "--attention-pairs-per-second",
        type=number(float, 1),
        metavar="N",
        help="pairs of tokens at all layers, which is what long prompts add (attention is free)",
    )
    group.add_argument(
        "--speed",
        type=Path,
        metavar="FILE.json",
        help="both of these, from the full prefills of `bench ttft` or `bench gpu`",
    )
