# SPDX-License-Identifier: Apache-2.0
"""What `figures.yaml` may say: machines and the tables made of their results."""

import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bench.harness import INSTRUCTION_SETS
from bench.tables import formats
from bench.tables.results import RESULTS, Finding, Result, one_sentence

FILE = Path("bench", "tables", "figures.yaml")
GOAL = re.compile(r"(>=|<=|>|<) (\d+(?:\.\d+)?)")
DEFAULT_COMMAND = ".venv/bin/python -m bench SUITE --json FILE"


class _Definition(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _is_set(text: str) -> str:
    if text not in INSTRUCTION_SETS:
        raise ValueError(f"no result says {text!r}: it is none of {', '.join(INSTRUCTION_SETS)}")
    return text


InstructionSet = Annotated[str, AfterValidator(_is_set)]


class Machine(_Definition):
    """A folder of results.

    Attributes:
        title: head of its columns.
        cpu: how `environment.cpu` begins.
        gpu: `environment.gpu`, if it has one.
        has, lacks: instruction sets, where a file tells its own.
        results: the files that it has; each must exist.
    """

    title: str
    cpu: str
    cores: int
    gpu: str | None = None
    has: list[InstructionSet] = []
    lacks: list[InstructionSet] = []
    results: list[str]

    def misplaced(self, file: Path, result: Result) -> str | None:
        """A sentence if a file of its folder was measured elsewhere."""
        where = result.environment
        sets = where.instruction_sets
        if (
            where.cpu.startswith(self.cpu)
            and where.cores == self.cores
            and where.gpu == self.gpu
            and (sets is None or (set(self.has) <= set(sets) and not set(self.lacks) & set(sets)))
        ):
            return None
        return (
            f"{file} would mix machines: it was measured on {where.cpu!r} "
            f"({where.cores} cores, {' '.join(sets or ['instruction sets unknown'])}), and "
            f"{file.parent.name!r} stands for {self.cpu!r} ({self.cores} cores"
            + (f", with {' '.join(self.has)}" if self.has else "")
            + (f", without {' '.join(self.lacks)})" if self.lacks else ")")
        )


def _is_goal(text: str | None) -> str | None:
    if text is not None and not GOAL.fullmatch(text):
        raise ValueError(f"the goal {text!r} is none of '>= 1', '<= 1', '> 1', '< 1'")
    return text


def _is_format(text: str) -> str:
    formats.keys(text)
    return text


Format = Annotated[str, AfterValidator(_is_format)]


class Figure(_Definition):
    """A line of a table with a column for each machine.

    Attributes:
        suite: results file, by its name in every machine's folder.
        value: a format of keys of its summary, as "{speedup:.1f}x"; a goal is that of the first.
        what: which figure this is.
        machines: those that have it, if not all do that have the file.
    """

    suite: str = Field(alias="from")
    value: Format
    what: str = ""
    goal: Annotated[str | None, AfterValidator(_is_goal)] = None
    machines: list[str] | None = None


class Head(BaseModel):
    """A line of a grid: whatever else it says selects rows of the results by value."""

    model_config = ConfigDict(extra="allow", strict=True)

    head: str

    @property
    def where(self) -> dict[str, Any]:
        return self.model_extra or {}


class Column(Head):
    """A column of a grid.

    Attributes:
        value: a format of keys of the row that line and column select together.
        source: another results file than the table's.
    """

    value: Format
    source: str | None = Field(default=None, alias="from")


class Table(_Definition):
    """Either `figures`, or a grid of `lines` and `columns` of the results file `from`
    (`MACHINE/SUITE`).

    Attributes:
        keys: whether figures are told by their keys of the summary, too.
        mixed: whether columns may come from several machines; their heads have to say which.
    """

    figures: list[Figure] = []
    keys: bool = True
    source: str = Field(default="", alias="from")
    lines: list[Head] = []
    columns: list[Column] = []
    mixed: bool = False


class Definitions(_Definition):
    """All of the file. `commands` say how results other than those of `bench` are made, `kept`
    why a results file stays that no page quotes."""

    machines: dict[str, Machine]
    commands: dict[str, str] = {}
    kept: dict[str, str] = {}
    tables: dict[str, Table]

    def command(self, suite: str) -> str:
        return self.commands.get(suite, DEFAULT_COMMAND)

    def machines_with(self, figure: Figure) -> list[str]:
        """Those that have a figure.

        Raises:
            Finding: none has, or one is unknown.
        """
        having = [name for name, it in self.machines.items() if figure.suite in it.results]
        for name in figure.machines or ():
            if name not in having:
                raise Finding(f"{FILE}: {name!r} has no results of {figure.suite!r}")
        if not having:
            raise Finding(f"{FILE}: no machine has results of {figure.suite!r}")
        return figure.machines or having

    def file(self, source: str) -> Path:
        """The results file of `MACHINE/SUITE`.

        Raises:
            Finding: the machine is not defined, or does not have it.
        """
        machine, _, suite = source.partition("/")
        if machine not in self.machines or suite not in self.machines[machine].results:
            raise Finding(f"{FILE}: among the machines' results is no {source!r}")
        return RESULTS / machine / f"{suite}.json"


def read(root: Path) -> Definitions:
    """The definitions of a checkout.

    Raises:
        Finding: the file is missing, is no YAML, or says what it may not.
    """
    try:
        content = yaml.safe_load((root / FILE).read_bytes())
        return Definitions.model_validate(content)
    except OSError as error:
        raise Finding(f"{FILE} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise Finding(f"{FILE}: {one_sentence(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Finding(f"{FILE} is no YAML: {' '.join(str(error).split())}") from None
