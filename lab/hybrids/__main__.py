# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.hybrids MODEL.pt ...`: do answers survive states composed of documents' maps?

Trainings of `python -m lab DIR --kind hybrid` are asked the same worlds: documents read alone, or
behind siblings, put into a prompt in every way of `lab/hybrids/arms.py`. Beside the file of
`--json` each world is kept in a file of lines, and a second start goes on behind them.
`BENCH_QUALITY_SEEDS=tuning` draws other worlds than those that are reported.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from statistics import fmean
from typing import Any

import torch

from bench import harness, records
from bench.quality import seeds
from lab.hybrid import Hybrid, HybridShape
from lab.hybrids import states, worlds
from lab.hybrids.arms import SOURCES, Prompt
from lab.hybrids.figures import ALL, FULL, Record, outcomes, rows
from lab.segments import Reader

MOST_WORK = 0.3
"""Of full prefill: what an arm may read to be worth having."""
LEAST_OF_FULL = 0.9
"""Of the answers of full prefill: what an arm must keep within that work."""
STATES = 8
"""Worlds of which states alone are looked at."""
SHOWN = ("training", "source", "arm", "work", "questions", "right", "of_full", "kl")


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status: 2 for bad input, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.hybrids", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("trained", type=Path, nargs="+", metavar="MODEL.pt", help="trainings")
    parser.add_argument("--worlds", type=int, default=100, metavar="N", help="that are asked (100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it here")
    args = parser.parse_args(argv)
    try:
        return run(args.trained, args.worlds, args.json)
    except (OSError, ValueError) as error:
        print(f"lab.hybrids: {error}", file=sys.stderr)
        return 2
    except harness.BenchError as error:
        print(f"lab.hybrids: {error}", file=sys.stderr)
        return 1


def run(trained: Sequence[Path], number: int, json: Path | None) -> int:
    """Measure what is missing, and report on all that is there.

    Raises:
        OSError, ValueError: a file is no training of a hybrid, or records are of another run.
    """
    readers = [Reader(loaded(path)) for path in trained]
    where = harness.environment()
    which = seeds.chosen()
    setting = {"trained": [_digest(path) for path in trained], "seeds": which}
    found: list[Record] = []
    file = records.beside(json) if json else None
    if file is not None:
        found = [*records.each(file, records.opened(file, "hybrids", setting), Record.read)]
        commits = {one.commit for one in found}
        records.require_commit(file, commits, where["commit"], any_commit=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    there = {(one.training, one.number, one.source) for one in found}
    missing = [
        (training, world)
        for world in range(number)
        for training in range(len(readers))
        if any((training, world, source) not in there for source in SOURCES)
    ]
    done = True
    try:
        for training, world in harness.progress(missing, "worlds"):
            for record in asked(readers[training], training, world, which):
                if (training, world, record.source) in there:
                    continue
                found.append(replace(record, commit=where["commit"]))
                if file is not None:
                    records.append(file, found[-1].entry)
    except KeyboardInterrupt:
        done = False
    if not found:
        raise harness.BenchError("nothing was measured")
    of_all = rows(found)
    summary = {**setting, **_verdict(of_all), **_of_states(readers, which)}
    where |= {"interrupted": not done}
    shown = [{name: row[name] for name in SHOWN} for row in of_all if row["kind"] == ALL]
    harness.report("hybrids", where, {"rows": shown, "summary": summary})
    if json:
        harness.write_json(json, "hybrids", where, {"rows": of_all, "summary": summary})
    return 0 if done else 130


def loaded(path: Path) -> Hybrid:
    """A trained hybrid.

    Raises:
        OSError: there is no such file.
        ValueError: it is something else.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = Hybrid(HybridShape(**saved["shape"]))
        model.load_state_dict(saved["model"])
    except (KeyError, TypeError, RuntimeError, UnpicklingError):
        raise ValueError(
            f"{path} is no model of `python -m lab DIR --kind hybrid`: name its model.pt"
        ) from None
    return model


def asked(reader: Reader, training: int, number: int, which: str) -> Iterator[Record]:
    """Ask one world in all arms; a record for each source of its documents.

    Raises:
        BenchError: reading in segments is not what reading at once is.
    """
    world = worlds.draw(number, which)
    prompt = Prompt(reader, world)
    full = prompt.answers_of_full()
    apart = prompt.apart_from_one_reading(full)
    if apart > 1e-2:
        raise harness.BenchError(f"world {number}: logits of segments are {apart:.2g} off")
    kinds = [one.kind for one in world.questions]
    for source in SOURCES:
        arms = {FULL: full} | prompt.arms(prompt.donors(source))
        yield Record(
            training=training,
            number=number,
            source=source,
            kinds=kinds,
            arms={name: outcomes(full, answers) for name, answers in arms.items()},
            work={name: round(answers.work, 6) for name, answers in arms.items()},
        )


def _verdict(of_all: Sequence[harness.Row]) -> dict[str, Any]:
    """Per training and source, the best that an arm keeps of full prefill's answers within
    `MOST_WORK`; arms that know full prefill are none."""
    found: dict[str, Any] = {}
    for row in of_all:
        if row["kind"] != ALL or row["work"] > MOST_WORK or row["arm"].startswith("exact"):
            continue
        key = f"best_of_full_{row['training']}_{row['source']}"
        if (row["of_full"] or 0.0) > found.get(key, 0.0):
            found |= {key: row["of_full"], f"{key}_arm": row["arm"]}
    best = [value for key, value in found.items() if not key.endswith("_arm")]
    return {**found, "survives": max(best, default=0.0) >= LEAST_OF_FULL}


def _of_states(readers: Sequence[Reader], which: str) -> dict[str, float]:
    some = [worlds.draw(number, which) for number in range(STATES)]
    found: dict[str, float] = {}
    for training, reader in enumerate(readers):
        for span, share in states.heads_kept(reader, some).items():
            found[f"heads_kept_{span}_{training}"] = round(share, 4)
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            errors = [states.composing_error(reader, world, dtype) for world in some]
            found[f"composing_error_{name}_{training}"] = fmean(errors)
    whole = readers[0].read(some[0].documents[0], readers[0].nothing(), kept=True).segment
    assert whole is not None
    for name, value in states.costs(readers[0], whole).items():
        found[name] = round(value, 2)
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
