# SPDX-License-Identifier: Apache-2.0
"""`python -m bench reuse --model DIR`: ways to recompute moved KV, compared in plain torch.

The examples and donors of `bench english`, without an engine: full prefill, donors and the first
reading are computed once for all leads of an example, so dozens of them cost seconds. Lengths of
time mean nothing here; `tests/e2e/test_english.py` checks choice and divergence against the engine.
Beside the file of `--json` each example is kept in a file of lines, and a second start goes
on behind them. `BENCH_QUALITY_SEEDS=tuning` draws the examples on which policies are chosen.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import harness, records
from bench.english.command import UsageError, require_model
from bench.english.records import model_digest
from bench.english.tasks import TASKS, USUAL
from bench.quality import seeds

COLUMNS = (
    *("source", "share", "lead", "examples", "work", "first_kl", "kl_p90", "answer_kl"),
    *("counted", "over_full", "less_full_low", "less_full_high"),
    *("answer_kl_less_default", "answer_kl_less_default_low", "answer_kl_less_default_high"),
)
"""Of a row, what is printed; its file has more."""
SOURCES = "siblings,reversed,alone"
LEADS = (
    "shift,default,focus,prophet,norms,two-rounds,rollout,documents,each,evenly,beginnings,hidden,"
    "further=.25,exact,foreseen,helpers"
)
SHARES = "0.1,0.15,0.25"


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status: 2 for bad input, 130 if it was interrupted."""
    args = _parser().parse_args(argv)
    try:
        return run(args)
    except (UsageError, records.RecordsError) as error:
        print(f"bench reuse: {error}", file=sys.stderr)
        return 2
    except harness.BenchError as error:
        print(f"bench reuse: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, and report on all that is there.

    Raises:
        UsageError: the model or a name is wrong.
        RecordsError: the records beside `--json` are of another run.
    """
    for folder in filter(None, (args.model, args.chooser)):
        require_model(folder)
    chosen = seeds.chosen()
    if args.rank_heads:
        return _rank_heads(args, chosen)
    where = harness.environment()
    setting = {
        "model": args.model.resolve().name,
        "model_digest": model_digest(args.model),
        "seeds": chosen,
        "seed": seeds.SETS[chosen],
        "dtype": args.dtype,
        "most_tokens": args.most_tokens,
        "chooser": None if args.chooser is None else model_digest(args.chooser),
        **{name: getattr(args, name) for name in ("sources", "leads", "shares")},
    }
    from bench.reuse.laboratory import Laboratory, Wanted
    from bench.reuse.records import Record, figures

    try:
        wanted = Wanted.named(args.sources, args.leads, args.shares)
    except ValueError as error:
        raise UsageError(str(error)) from None
    found: list[Record] = []
    commit = harness.commit()
    file = records.beside(args.json) if args.json else None
    if file is not None:
        found = [*records.each(file, records.opened(file, "reuse", setting), Record.read)]
        records.require_commit(file, {one.commit for one in found}, commit, any_commit=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    laboratory = Laboratory(args.model, args.chooser, args.dtype, chosen, args.most_tokens)
    steps = list(_missing(args.tasks, args.examples, wanted.sources, found))
    done = True
    try:
        for task, number in harness.progress(steps, "examples"):
            for record in laboratory.measured(task, number, wanted):
                found.append(replace(record, commit=commit))
                if file is not None:
                    records.append(file, found[-1].entry)
    except KeyboardInterrupt:
        done = False
    if not found:
        raise harness.BenchError("nothing was measured")
    result = figures(found)
    result["summary"] = {**setting, **result["summary"]}
    shown = [{name: row.get(name) for name in COLUMNS} for row in result["rows"]]
    where |= {"interrupted": not done}
    harness.report("reuse", where, {"rows": shown, "summary": result["summary"]})
    if args.json:
        harness.write_json(args.json, "reuse", where, result)
    return 0 if done else 130


def _rank_heads(args: argparse.Namespace, chosen: str) -> int:
    """Print the lead of the heads that tell most, and what each of them tells."""
    if chosen != "tuning":
        raise UsageError("heads are chosen on examples of BENCH_QUALITY_SEEDS=tuning")
    from bench.reuse import heads
    from bench.reuse.laboratory import Laboratory, Wanted

    wanted = Wanted.named(args.sources, "", args.shares)
    laboratory = Laboratory(args.model, None, args.dtype, chosen, args.most_tokens)
    steps = [(task, number) for number in range(args.examples) for task in args.tasks]
    found = [
        heads.Told.of(scene, wanted.shares[0])
        for task, number in harness.progress(steps, "examples")
        for *_, scene in laboratory.scenes(task, number, wanted.sources)
    ]
    best = heads.best(found, args.rank_heads)
    print("heads=" + "+".join(f"{layer}.{head}" for layer, head in best))
    print(f"the policy's choice tells {fmean(one.policy for one in found):.3f}; a head alone")
    print("\n".join(f"{layer}.{head}  {told:.3f}" for (layer, head), told in best.items()))
    return 0


def _missing(
    tasks: Sequence[str], examples: int, sources: Sequence[str], found: Sequence[Any]
) -> Iterator[tuple[str, int]]:
    there = {(one.task, one.number, one.source) for one in found}
    for number in range(examples):
        for task in tasks:
            if any((task, number, source) not in there for source in sources):
                yield task, number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench reuse", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--chooser", type=Path, metavar="DIR", help="a model for lead `smaller`")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--tasks", type=_names, default=USUAL, metavar="NAMES", help=", ".join(TASKS)
    )
    parser.add_argument("--examples", type=int, default=4, metavar="N", help="of each task (4)")
    parser.add_argument("--sources", default=SOURCES, help=f"of the documents' KV ({SOURCES})")
    parser.add_argument("--leads", default=LEADS, help=f"({LEADS})")
    parser.add_argument("--shares", default=SHARES, help=f"of the reused tokens ({SHARES})")
    parser.add_argument(
        "--most-tokens",
        type=int,
        default=2600,
        metavar="N",
        help="documents of an example; longer ones are drawn again, or passed over (2600)",
    )
    parser.add_argument(
        "--rank-heads",
        type=int,
        metavar="N",
        help="only print the lead `heads=` of the N heads that tell most of what to recompute, "
        "with the first of --shares",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it here")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    for name in names:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return names
