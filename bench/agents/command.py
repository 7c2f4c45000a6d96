# SPDX-License-Identifier: Apache-2.0
"""`python -m bench agents --model DIR`: what reuse saves and costs an agent with tools.

Conversations of a ReAct agent with a search and a calculator are served over HTTP under several
arms (`arms`), as traces of one or more users (`traces`). Behind the right history every step has a
label; the model also leads conversations itself. Distances from full prefill are measured in this
process. An interrupt (Ctrl-C) ends it early, with figures of what was measured; traces that were
compared with full prefill are in a file beside `--json`, and the same command goes on behind them.
`BENCH_QUALITY_SEEDS=tuning` draws the traces on which options are chosen.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import openai

from bench import harness
from bench.agents import arms, distance, figures, success
from bench.agents.arms import Arm
from bench.agents.records import Compared
from bench.agents.traces import KINDS, Trace, Writer, draw
from bench.english import text
from bench.english.command import UsageError, require_model
from bench.english.records import model_digest
from bench.quality import seeds
from bench.records import RecordsError, beside
from bench.server import ServerError

if TYPE_CHECKING:
    from bench.agents.serving import Client

T = TypeVar("T")

COLUMNS = (
    *("trace", "arm", "conversations", "prefix", "equal", "similar", "work"),
    *("tool_success", "task_success", "ttft_s", "total_s", "saved_over_none", "saved_over_prefix"),
)
"""Of a row, what is printed; its file has more."""
SERVING, DISTANCE, SUCCESS, RETRIEVAL = "serving", "distance", "success", "retrieval"
PARTS = (SERVING, DISTANCE, SUCCESS, RETRIEVAL)
DTYPES = ("bfloat16", "float16", "float32")
DTYPE = "bfloat16"
TEMPERATURE = 0.2
RERUNS = 5
_COMPARISONS: Mapping[str, tuple[Callable[..., Iterator[list[Any]]], type[Any]]] = MappingProxyType(
    {DISTANCE: (distance.measure, distance.Apart), SUCCESS: (success.measure, success.Paired)}
)
_WARM_UP = 10**6
"""Number of the trace that is not measured."""


@dataclass(frozen=True)
class Load:
    """How much is asked.

    Attributes:
        kinds: of traces.
        arms: that are served.
        compared: arms that are compared with full prefill in this process.
        traces: of each kind.
        free: traces of one user that the model also leads itself.
        reruns: traces of one user that are repeated at a temperature.
        distant: traces of each kind that are compared with full prefill in this process.
        seeds: name of the set that they are drawn from.
        minutes: of each server and engine, after which nothing new begins; None: any.
        parts: some of `PARTS`.
        dtype: in which the model computes, vLLM's option.
    """

    kinds: Sequence[str]
    arms: Sequence[Arm]
    compared: Sequence[Arm]
    traces: int
    free: int
    reruns: int
    distant: int
    seeds: str
    minutes: float | None = None
    parts: Sequence[str] = PARTS
    dtype: str = DTYPE


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status: 2 for bad input, 130 if it was interrupted."""
    args = argument_parser().parse_args(argv)
    try:
        require_model(args.model)
        return run(args, load_of(args))
    except (UsageError, RecordsError) as error:
        print(f"bench agents: {error}", file=sys.stderr)
        return 2
    except harness.BenchError as error:
        print(f"bench agents: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace, load: Load) -> int:
    """Measure, and report on what was measured.

    Raises:
        BenchError: nothing can be measured.
        RecordsError: the records beside `--json` are of another run.
    """
    where = harness.environment() | {"quick": args.quick}
    measured, done, started = figures.Measured(), True, time.monotonic()
    setting = {
        "model": args.model.resolve().name,
        "model_digest": model_digest(args.model),
        "dtype": load.dtype,
        "seeds": load.seeds,
        "seed": seeds.SETS[load.seeds],
        "text": text.digest(),
    }
    file = beside(args.json) if args.json and {DISTANCE, SUCCESS} & set(load.parts) else None
    compared = Compared(file, setting, where["commit"], args.resume)
    where |= {"commits": sorted(map(str, compared.commits))}
    try:
        if RETRIEVAL in load.parts:
            measured.similar = retrieval(args.quick)
        if SERVING in load.parts:
            serve(args.model, load, measured)
        if DISTANCE in load.parts:
            for apart in in_process(args.model, load, DISTANCE, compared):
                measured.apart += apart
        if SUCCESS in load.parts:
            for paired in in_process(args.model, load, SUCCESS, compared):
                measured.paired += paired
    except KeyboardInterrupt:
        print("interrupted: figures are of what was measured", file=sys.stderr)
        done = False
    except (ServerError, httpx.HTTPError, openai.OpenAIError) as error:
        raise harness.BenchError(str(error)) from error
    where |= {"seconds": round(time.monotonic() - started, 1), "interrupted": not done}
    result = figures.result(measured)
    result = {"rows": result["rows"], "summary": {**setting, **result["summary"]}}
    harness.report("agents", where, shown(result))
    if args.json:
        harness.write_json(args.json, "agents", where, result)
    return 0 if done else 130


def shown(result: harness.SuiteResult) -> harness.SuiteResult:
    """What of a result a person wants to see: conversations are in the file."""
    rows = [row for row in result["rows"] if "conversation" not in row]
    served = [{key: row[key] for key in COLUMNS} for row in rows if "trace" in row]
    rest = [row for row in rows if "trace" not in row]
    return {"rows": [*served, *rest], "summary": result["summary"]}


def serve(model: Path, load: Load, measured: figures.Measured) -> None:
    """Ask servers; a trace counts once all arms of its server have been asked."""
    from transformers import AutoTokenizer

    from bench.agents.serving import asking

    writer = Writer(AutoTokenizer.from_pretrained(model))
    warm_up = draw("single", _WARM_UP, "tuning")
    warm_up = replace(warm_up, requests=warm_up.requests[:2])

    for options, mine in arms.by_server(load.arms):
        with asking(model, options, load.dtype, writer) as client:
            for arm in mine:  # the first requests of a server are slow
                client.trace(warm_up, arm)
            steps = [
                partial(measure, client, draw(kind, number, load.seeds), mine, measured)
                for number in range(load.traces)
                for measure, kind in _in_turn(load, number)
            ]
            for turn, step in enumerate(within(load.minutes, steps, "traces", len(steps))):
                step(turn)


def _in_turn(load: Load, number: int) -> Iterator[tuple[Callable[..., None], str]]:
    """What is done with the traces of a number, and the kind of each."""
    for kind in load.kinds:
        yield _follow, kind
    if number < load.free:
        yield _lead, "single"
    if number < load.reruns:
        yield _repeat, "single"


def _follow(
    client: Client, trace: Trace, mine: Sequence[Arm], measured: figures.Measured, turn: int
) -> None:
    found = [client.trace(trace, arm) for arm in harness.rotated(mine, turn)]
    measured.taken += [it for taken in found for it in taken]


def _lead(
    client: Client, trace: Trace, mine: Sequence[Arm], measured: figures.Measured, turn: int
) -> None:
    measured.free += [client.free(trace, 0, arm) for arm in harness.rotated(mine, turn)]


def _repeat(
    client: Client, trace: Trace, mine: Sequence[Arm], measured: figures.Measured, turn: int
) -> None:
    texts = {
        arm.name: [
            "".join(it.answered.said for it in client.trace(trace, arm, TEMPERATURE, seed))
            for seed in range(RERUNS)
        ]
        for arm in harness.rotated(mine, turn)
    }
    for arm in mine:
        measured.reruns.setdefault(arm.name, []).append(texts[arm.name])


def in_process(model: Path, load: Load, part: str, compared: Compared) -> Iterator[list[Any]]:
    """What is found at each step of the traces that are compared with full prefill, with an engine
    for each set of server options; what was measured before comes first."""
    from bench.english.engine import english_engine

    # What measures the steps of a trace, and what a step is.
    measure, step = _COMPARISONS[part]
    numbered = [(kind, number) for number in range(load.distant) for kind in load.kinds]
    traces = [draw(*which, load.seeds) for which in numbered]
    for options, mine in arms.by_server(load.compared):
        known = [compared.steps(part, trace, mine, step) for trace in traces]
        yield from (steps for steps in known if steps is not None)
        missing = [trace for trace, steps in zip(traces, known, strict=True) if steps is None]
        if not missing:
            continue
        with english_engine(model, kv_space_gib=1, segreuse=options, dtype=load.dtype) as lab:
            steps = _recorded(partial(measure, lab, arms=mine), part, missing, mine, compared)
            total = sum(len(trace.requests) for trace in missing)
            yield from within(load.minutes, steps, part, total)


def _recorded(
    measure: Callable[[Trace], Iterator[list[Any]]],
    part: str,
    traces: Iterable[Trace],
    mine: Sequence[Arm],
    compared: Compared,
) -> Iterator[list[Any]]:
    """Steps of traces; those of a whole one are kept."""
    for trace in traces:
        kept = list[Any]()
        for found in measure(trace):
            kept += found
            yield found
        compared.add(part, trace, mine, kept)


def within(minutes: float | None, steps: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Steps, with progress, of which none begins when the time is over; the first always does."""
    started = time.monotonic()
    for done, step in enumerate(harness.progress(steps, what, total), 1):
        yield step
        if done < total and minutes is not None and time.monotonic() - started >= 60 * minutes:
            print(f"{what}: the time is over after {done} of {total}", file=sys.stderr)
            return


def retrieval(quick: bool) -> harness.SuiteResult:
    """What `bench similar` measures of the search: its labelled pairs, and its time on arrival."""
    from bench.suites import similar

    result = similar.run(quick)
    total = next(row for row in result["rows"] if row.get("edited_words") == "all")
    return {
        "rows": [row for row in result["rows"] if "edited_words" in row],
        "summary": {
            "precision_tau80": total["precision"],
            "recall_tau80": total["recall"],
            "arrival_ms": result["summary"]["arrival_ms_hit"],
            "pairs": total["pairs"],
            "right_pairs": round(total["precision"] * total["pairs"]),
        },
    }


def load_of(args: argparse.Namespace) -> Load:
    """What the arguments ask for.

    Raises:
        UsageError: a name or a number is wrong.
    """
    numbers = {"traces": args.traces, "free": args.free, "reruns": args.reruns}
    numbers["distant"] = args.distant
    usual = _QUICK if args.quick else _USUAL
    chosen = {name: usual[name] if it is None else it for name, it in numbers.items()}
    for name, number in chosen.items():
        if number < 0:
            raise UsageError(f"--{name} {number}: it cannot be negative")
    try:
        served = arms.find(_split(args.arms)) or list(arms.ARMS.values())
        others = [] if args.quick else arms.ABLATIONS.values()
        compared = arms.find(_split(args.compared)) or [
            *(arm for arm in arms.ARMS.values() if arm.options is not None),
            *others,
        ]
        which = seeds.chosen()
    except (ValueError, harness.BenchError) as error:
        raise UsageError(str(error)) from None
    plain = [arm.name for arm in compared if arm.options is None]
    if plain:
        raise UsageError(f"--compared: {plain[0]} reuses no segments, so it is full prefill")
    return Load(
        kinds=_known("kind", args.kinds, KINDS),
        arms=served,
        compared=compared,
        seeds=which,
        minutes=args.minutes,
        parts=_known("part", args.parts, PARTS),
        dtype=args.dtype,
        **chosen,
    )


_USUAL = {"traces": 8, "free": 8, "reruns": 4, "distant": 3}
_QUICK = {"traces": 1, "free": 1, "reruns": 1, "distant": 1}


def _known(what: str, given: str | None, known: Iterable[str]) -> list[str]:
    names = _split(given)
    for name in names:
        if name not in list(known):
            raise UsageError(f"no {what} {name!r}; there are {', '.join(known)}")
    return names or list(known)


def _split(given: str | None) -> list[str]:
    return list(dict.fromkeys(filter(None, (given or "").split(","))))


def argument_parser() -> argparse.ArgumentParser:
    """Of the options of this command; `load_of` reads what it returns."""
    parser = argparse.ArgumentParser(
        prog="python -m bench agents", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="a folder of Hugging Face")
    add("--quick", action="store_true", help="a rough answer, sooner")
    add("--json", type=Path, metavar="FILE", help="also write the result here")
    add("--kinds", metavar="NAMES", help=f"of traces: some of {', '.join(KINDS)}")
    add("--arms", metavar="NAMES", help=f"that are served: {', '.join(arms.ARMS)}, or ablations")
    add("--compared", metavar="NAMES", help=f"with full prefill: also {', '.join(arms.ABLATIONS)}")
    add("--parts", metavar="NAMES", help=f"some of {', '.join(PARTS)}")
    add("--traces", type=int, metavar="N", help="of each kind (8)")
    add("--free", type=int, metavar="N", help="conversations that the model leads (8)")
    add("--reruns", type=int, metavar="N", help=f"traces repeated {RERUNS} times (4)")
    add("--dtype", default=DTYPE, choices=DTYPES, help=f"in which the model computes ({DTYPE})")
    add("--minutes", type=float, metavar="N", help="of each server; then nothing new begins")
    add("--resume", action="store_true", help="go on with records of another commit, too")
    add("--distant", type=int, metavar="N", help="traces of each kind compared with full (3)")
    return parser
