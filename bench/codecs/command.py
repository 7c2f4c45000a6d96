# SPDX-License-Identifier: Apache-2.0
"""`python -m bench codecs [--model DIR]`: codecs of the second tier, their speed and their quality.

Without a model only speed is measured: what a codec decodes and turns in a second, as a share of
what memcpy moves. With one, the distribution of the first token is compared with that of full
prefill, with documents that are read from records of each codec (`quality`).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from bench import harness
from bench.codecs import USUAL, speed
from bench.english.tasks import TASKS

SAMPLES = 8
QUICK_SAMPLES = 1


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status: 2 for bad input, 130 if it was interrupted."""
    args = _parser().parse_args(argv)
    tasks = tuple(args.tasks.split(",")) if args.tasks else USUAL
    for task in tasks:
        if task not in TASKS:
            print(f"bench codecs: no task {task!r}; there are {', '.join(TASKS)}", file=sys.stderr)
            return 2
    where = harness.environment() | {"quick": args.quick}
    started = time.monotonic()
    result = speed.measure(args.quick)
    done = True
    try:
        if args.model is not None:
            samples = args.samples or (QUICK_SAMPLES if args.quick else SAMPLES)
            found = _quality(args.model, tasks, samples, args.dtype)
            done = not found.pop("interrupted", False)
            result = _joined(result, found)
    except harness.BenchError as error:
        print(f"bench codecs: {error}", file=sys.stderr)
        return 1
    where |= {"seconds": round(time.monotonic() - started, 1), "interrupted": not done}
    harness.report("codecs", where, result)
    if args.json:
        harness.write_json(args.json, "codecs", where, result)
    return 0 if done else 130


def _quality(model: Path, tasks: tuple[str, ...], samples: int, dtype: str) -> harness.SuiteResult:
    from bench.codecs import quality  # it loads vLLM

    return quality.measure(model, tasks, samples, dtype)


def _joined(one: harness.SuiteResult, other: harness.SuiteResult) -> harness.SuiteResult:
    summary: dict[str, Any] = {**one["summary"], **other["summary"]}
    return {"rows": [*one["rows"], *other["rows"]], "summary": summary}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench codecs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a folder of Hugging Face")
    parser.add_argument(
        "--dtype", default="auto", metavar="NAME", help="vLLM's option for the model (auto)"
    )
    parser.add_argument("--quick", action="store_true", help="a rough answer, sooner")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--tasks", metavar="NAMES", help=f"some of {', '.join(TASKS)}")
    parser.add_argument(
        "--samples", type=int, metavar="N", help=f"examples of each task ({SAMPLES})"
    )
    return parser
