# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench SUITE [--quick] [--json FILE]`, `bench all`, `bench tables`."""

import argparse
import functools
import importlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from bench import harness

SUITES = {
    "ttft": "time to the first token: full prefill against segment reuse",
    "host": "what a first token costs beside the model, by part",
    "lookup": "finding segments among 100,000 and 1,000,000 indexed blocks",
    "similar": "similar segments: cost, precision and recall, and what they add (synthetic)",
    "demo": "what `make demo` shows, as figures; with --model DIR: that model's answers",
    "kernels": "alignment, sparse-query attention and token scores by themselves",
    "quality": "what each policy loses against full prefill, and what it computes",
    "link": "models trained on documents computed alone: accuracy, work, first token",
    "rag": "questions over a knowledge base: the server with extra keys against without",
    "churn": "knowledge bases that change all the time in a nearly full pool: leaks, failures",
    "tier": "the second tier: questions over a base that is larger than the KV memory",
    "isolation": "whether time tells a stranger what is cached for somebody else",
    "soak": "a long mixed load on a small pool: leaks, hangs, failures, memory, latency",
    "states": "a hybrid with linear attention: the first token where states are composed",
    "stall": "what decoding requests wait for the long prompts of others",
    "overhead": "requests that do not use reuse: the plugin against vLLM alone",
    "observe": "requests that are only observed, against requests without extra keys",
    "estimate": "`vllm-segreuse estimate` on 1,000 requests, with all policies",
    "router": "two servers behind nginx: what is reused with the header, and without",
    "gpu": "on a GPU: models of real shapes, long contexts, serving (docs/gpu.md)",
}
COMMANDS = {
    "all": ("bench.everything", "all that the README quotes, into one folder (--out DIR)"),
    "agents": ("bench.agents.command", "what reuse saves and costs an agent with tools"),
    "edits": ("bench.edits.command", "what edits of a context cost: thoughts, results, tools"),
    "codecs": (
        "bench.codecs.command",
        "codecs of the second tier: speed; with --model DIR: quality",
    ),
    "english": ("bench.english.command", "what reuse costs a pretrained model on English text"),
    "reuse": ("bench.reuse.command", "ways to recompute moved KV, in plain torch: no engine"),
    "trace": ("bench.trace.command", "a trace of ids: an estimate, and the engine's own word"),
    "fleet": ("bench.fleet.command", "a trace of ids: many engines and a router, simulated"),
    "tables": ("bench.tables.command", "the tables of figures in the pages (--check)"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one suite or command; returns the exit status: 130 if it was interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        module, _ = COMMANDS[argv[0]]
        return int(importlib.import_module(module).main(argv[1:]))
    if argv[:1] == ["demo"] and any(word.partition("=")[0] == "--model" for word in argv):
        return int(importlib.import_module("bench.demo").main(argv[1:]))
    commands = {name: text for name, (_, text) in COMMANDS.items()}
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"suites:\n{_listed(SUITES)}\n\nand:\n{_listed(commands)}",
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--quick", action="store_true", help="a rough answer, sooner")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    parser.add_argument(
        "--part", action="append", help="gpu, overhead, tier: this part only; may be repeated"
    )
    args = parser.parse_args(argv)

    suite = cast(harness.Suite, importlib.import_module(f"bench.suites.{args.suite}"))
    if args.html and not hasattr(suite, "write_html"):
        parser.error(f"{args.suite} writes no page: --html is for quality and link")
    parts = getattr(suite, "PARTS", ())
    for part in args.part or ():
        if part not in parts:
            parser.error(f"{args.suite} has no part {part!r}; its parts: {', '.join(parts) or '-'}")
    where = harness.environment() | {"quick": args.quick}
    started = time.monotonic()
    more: dict[str, Any] = {"parts": args.part} if args.part else {}
    if args.json and getattr(suite, "KEEPS_PARTS", False):
        more["keep"] = functools.partial(harness.write_json, args.json, args.suite, where)
    try:
        result = suite.run(args.quick, **more)
    except harness.BenchError as error:
        print(f"bench {args.suite}: {error}", file=sys.stderr)
        return 1
    where["omp_threads_bind"] = os.environ.get(harness.CORE_BINDING)  # suites may set it
    where["seconds"] = round(time.monotonic() - started, 1)
    where["interrupted"] = result.pop("interrupted", False)
    # A suite may have rows too long to be printed.
    harness.report(args.suite, where, getattr(suite, "shown", lambda it: it)(result))
    if args.json:
        harness.write_json(args.json, args.suite, where, result)
    if args.html:
        suite.write_html(args.html, where, result)  # type: ignore[attr-defined]
    return 130 if where["interrupted"] else 0


def _listed(texts: Mapping[str, str]) -> str:
    return "\n".join(f"  {name:10}{text}" for name, text in texts.items())


if __name__ == "__main__":
    harness.exit_on_signals()
    sys.exit(main())
