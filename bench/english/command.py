# SPDX-License-Identifier: Apache-2.0
"""`python -m bench english --model DIR`: what reuse costs a pretrained model on English text.

Every example is asked in full, and with documents that were computed elsewhere (`donors`), under
every policy. Beside the file of `--json` each example is kept in a file of lines: a second start
goes on where the first stopped. `BENCH_QUALITY_SEEDS=tuning` asks the examples on which policies
are chosen. `--records` reports on what is in such files, of several processes or an earlier version
of the figures, and asks nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from bench import harness
from bench.english import arms, donors, text
from bench.english.figures import figures, in_cells
from bench.english.records import Records, Setting, model_digest, weights
from bench.english.run import Load, measure
from bench.english.tasks import TASKS, USUAL
from bench.quality import seeds
from bench.records import RecordsError, beside

SAMPLES = 40
QUICK_SAMPLES = 3
QUICK_TASKS = ("needles", "one-hop", "pronoun", "contracts", "chat")
COLUMNS = (
    *("task", "donors", "policy", "samples", "accuracy", "low", "high", "p_holm", "verdict"),
    *("first_kl", "answer_kl", "agreement", "work", "ttft_ms"),
)
"""Of a row, what is printed; its file has more."""


class UsageError(harness.BenchError):
    """What was asked for cannot be; the text is one sentence."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status: 2 for bad input, 130 if it was interrupted."""
    try:
        args = _parser().parse_args(argv)
        return reported_again(args) if args.records else run(args)
    except (UsageError, RecordsError) as error:
        print(f"bench english: {error}", file=sys.stderr)
        return 2
    except harness.BenchError as error:
        print(f"bench english: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, then report on all that is there.

    Raises:
        UsageError: the model, a name or a number is wrong.
        RecordsError: the records beside `--json` are of another run.
    """
    if args.model is None:
        raise UsageError("--model DIR is needed: a folder of Hugging Face")
    load = load_of(args)
    commit = harness.commit()
    file = beside(args.json) if args.json else None
    setting = setting_of(args.model, load.seeds, args.kv_cache_dtype, load.least_documents)
    records = Records.open(file, setting, commit, args.resume)
    where = harness.environment() | {"quick": args.quick}
    started = time.monotonic()

    from bench.english.engine import english_engine

    with english_engine(args.model, args.kv_space_gib, args.kv_cache_dtype) as lab:
        where["chat_template"] = lab.prompts.chat
        done = measure(lab, load, records, commit)
    if not len(records):
        return 130
    where |= {
        "seconds": round(time.monotonic() - started, 1),
        "commits": commits(records),
        "interrupted": not done,
    }
    tell(args, where, records)
    return 0 if done else 130


def reported_again(args: argparse.Namespace) -> int:
    """Report on records that are there; no model is loaded.

    The environment is where they were measured: that of `--json`, where it exists, or of the result
    beside the first file of records.

    Raises:
        UsageError: a result is none, or there is none.
        RecordsError: files do not belong together, or are none of this command.
    """
    files = [Path(name) for name in _split(args.records)]
    records = Records.joined(files)
    results = [*filter(None, [args.json]), files[0].with_suffix(".json")]
    where = next((_environment(one) for one in results if one.exists()), None)
    if where is None:
        raise UsageError(
            f"{results[-1]} does not exist, so nothing says where {files[0]} was measured: put the "
            "result beside its records"
        )
    if args.json:
        records.write(beside(args.json))
    of_one_process = ("seconds", "interrupted")
    where = {name: value for name, value in where.items() if name not in of_one_process}
    tell(args, where | {"commits": commits(records)}, records)
    return 0


def _environment(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text())["environment"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{file} is no result of `bench`: choose another name") from None


def commits(records: Records) -> list[str]:
    """Those that records were measured at."""
    return sorted(map(str, records.commits))


def tell(args: argparse.Namespace, where: dict[str, Any], records: Records) -> None:
    """Print the figures; write the result and the page where they are wanted."""
    result = result_of(records)
    harness.report("english", where, shown(result))
    if args.json:
        harness.write_json(args.json, "english", where, result)
    if args.html:
        from bench.english import page

        page.write(args.html, where, result)


def result_of(records: Records) -> harness.SuiteResult:
    """Figures of all records."""
    rows, summary = figures(records)
    setting = records.setting
    return {"rows": rows, "summary": setting.entry() | summary}


def shown(result: harness.SuiteResult) -> harness.SuiteResult:
    """What of a result fits a terminal's width."""
    rows = [{key: row.get(key) for key in COLUMNS} for row in in_cells(result)]
    return {"rows": rows, "summary": result["summary"]}


def load_of(args: argparse.Namespace) -> Load:
    """What the arguments ask for.

    Raises:
        UsageError: a name or a number is wrong.
    """
    samples = args.samples
    if samples is None:
        samples = QUICK_SAMPLES if args.quick else SAMPLES
    if samples < 1:
        raise UsageError(f"--samples {samples}: at least 1 is needed")
    try:
        chosen = [arms.arm(name) for name in _split(args.policies)]
        which = seeds.chosen()
    except (ValueError, harness.BenchError) as error:
        raise UsageError(str(error)) from None
    usual = arms.QUICK if args.quick else arms.PUBLISHED
    return Load(
        tasks=_named("task", args.tasks, TASKS) or (QUICK_TASKS if args.quick else USUAL),
        donors=_named("donors", args.donors, donors.DONORS) or donors.DONORS,
        arms=tuple(chosen) or tuple(map(arms.arm, usual)),
        samples=samples,
        seeds=which,
        least_documents=args.least_documents,
    )


def setting_of(
    model: Path, which: str, kv_cache_dtype: str = "auto", least_documents: int = 1
) -> Setting:
    """What records of this run have in common.

    Raises:
        UsageError: there is no model in the folder.
    """
    require_model(model)
    return Setting(
        model=model.resolve().name,
        model_digest=model_digest(model),
        seeds=which,
        seed=seeds.SETS[which],
        text=text.digest(),
        kv_cache_dtype=kv_cache_dtype,
        least_documents=least_documents,
    )


def require_model(model: Path) -> None:
    """Look for what a Hugging Face folder must have.

    Raises:
        UsageError: there is no model in the folder.
    """
    if not (model / "config.json").is_file() or not weights(model):
        raise UsageError(
            f"no model in {model}: --model needs a folder with config.json, weights and tokenizer"
        )


def _named(what: str, given: str | None, known: Iterable[str]) -> tuple[str, ...]:
    known = list(known)
    names = tuple(_split(given))
    for name in names:
        if name not in known:
            raise UsageError(f"no {what} {name!r}; there are {', '.join(known)}")
    return names


def _split(given: str | None) -> list[str]:
    return list(dict.fromkeys(filter(None, (given or "").split(","))))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m bench english", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="a folder of Hugging Face")
    parser.add_argument("--quick", action="store_true", help="a rough answer, sooner")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    parser.add_argument("--tasks", metavar="NAMES", help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--donors", metavar="NAMES", help=f"some of {', '.join(donors.DONORS)}")
    parser.add_argument(
        "--policies",
        metavar="NAMES",
        help=f"some of {', '.join(arms.NAMED)}, or POLICY:option=value:option=value",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help=f"examples of each task ({SAMPLES})"
    )
    parser.add_argument(
        "--least-documents",
        type=int,
        default=1,
        metavar="N",
        help="of these, only prompts of so many documents",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with records of another commit, too"
    )
    parser.add_argument(
        "--records",
        metavar="FILES",
        help="report on these files of records together, and measure nothing",
    )
    parser.add_argument(
        "--kv-space-gib", type=int, default=4, metavar="N", help="memory for KV on the CPU (4)"
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="NAME", help="vLLM's option, as fp8 (auto)"
    )
    return parser
