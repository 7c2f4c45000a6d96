# SPDX-License-Identifier: Apache-2.0
"""Results files: read, and whether they say what anybody could measure again."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench import harness
from bench.agents import by_trace

RESULTS = Path("bench", "results")
INTERRUPTED = "ended by Ctrl-C"
"""What the command of an interrupted run says, in brackets behind it."""
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


class Finding(Exception):  # noqa: N818 - nothing has failed: it is what a check reports
    """What does not hold, in one sentence that names the file."""


class Environment(BaseModel):
    """What a table says of a measurement; see `harness.environment`.

    Attributes:
        commits: all of them, where records of several are together; `commit` is of the last run.
        interrupted: whether Ctrl-C ended it.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    date: str = Field(pattern=r"^\d{4}-\d\d-\d\dT")
    commit: str | None
    cpu: str
    cores: int
    gpu: str | None = None
    vllm: str | None = None
    torch: str | None = None
    instruction_sets: list[str] | None = None
    quick: bool = False
    interrupted: bool = False
    commits: list[str] | None = None

    @property
    def measured_at(self) -> list[str | None]:
        """Every commit that something was measured at."""
        return [*dict.fromkeys([*(self.commits or ()), self.commit])]

    @property
    def machine(self) -> str:
        """Processors, and the versions that ran on them."""
        named = f"{self.gpu}, " if self.gpu else ""
        named += f"{self.cpu}, {self.cores} {'core' if self.cores == 1 else 'cores'}"
        return f"{named}, vLLM {self.vllm}, torch {self.torch}" if self.vllm else named


class Result(BaseModel):
    """A results file, as `harness.write_json` writes it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    suite: str
    environment: Environment
    rows: list[dict[str, Any]]
    summary: dict[str, Any]


def read(root: Path, file: Path) -> Result:
    """One results file, `file` below `root`.

    Raises:
        Finding: it is missing, or no results file.
    """
    try:
        result = Result.model_validate_json((root / file).read_bytes())
    except FileNotFoundError:
        raise Finding(f"{file} does not exist: measure it, or take it out of the tables") from None
    except OSError as error:
        raise Finding(f"{file} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise Finding(f"{file} is no results file: {one_sentence(error)}") from None
    if not _is_named(file.stem, result.suite):
        raise Finding(f"{file} holds results of the suite {result.suite!r}, not of {file.stem!r}")
    if result.suite == "agents":
        result.summary = by_trace.summary(result.summary, result.rows)
    return result


def one_sentence(error: ValidationError) -> str:
    """The first thing that is wrong, with its place."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"].splitlines()[0]
    return f"{place}: {message}" if place else message


def _is_named(stem: str, suite: str) -> bool:
    """`quality-seed0` is a variant of the suite `quality`."""
    suite = suite.replace("_", "-")
    return stem == suite or stem.startswith(f"{suite}-")


def check_provenance(history: "History", file: Path, result: Result, command: str) -> Iterator[str]:
    """Why nobody could measure this again: a sentence for each reason.

    Args:
        command: how the pages say that it was made.
    """
    if result.environment.quick:
        yield f"{file} was measured with --quick, which gives a rough answer only"
    if result.environment.interrupted and INTERRUPTED not in command:
        yield (
            f"{file} was interrupted, and its command does not say so: add {INTERRUPTED!r}, and "
            "where, to it"
        )
    for commit in result.environment.measured_at:
        if not commit:
            yield f"{file} names no commit: measure it in a git checkout"
        elif commit.endswith("-dirty"):
            yield f"{file} was measured on uncommitted code ({commit}): commit, and measure again"
        elif not _COMMIT.fullmatch(commit):
            yield f"{file} names no commit, but {commit!r}"
        elif doubt := history.doubt(commit):
            yield f"{file}: {doubt}"


class History:
    """What git knows of commits; each is looked up once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._doubts: dict[str, str | None] = {}

    def doubt(self, commit: str) -> str | None:
        """What speaks against a commit; None if it is part of HEAD's history."""
        if commit not in self._doubts:
            self._doubts[commit] = self._look_up(commit)
        return self._doubts[commit]

    def _look_up(self, commit: str) -> str | None:
        try:
            if self._knows("merge-base", "--is-ancestor", commit, "HEAD"):
                return None
            shallow = self._git("rev-parse", "--is-shallow-repository") == "true\n"
            if not self._knows("cat-file", "-e", f"{commit}^{{commit}}"):
                if shallow:
                    return f"commit {commit} is not in this shallow clone: git fetch --unshallow"
                return f"commit {commit} is unknown to git"
            if shallow:
                return f"this shallow clone cannot tell whether HEAD contains commit {commit}"
        except FileNotFoundError:
            return f"git is not installed, so commit {commit} cannot be looked up"
        except (OSError, subprocess.SubprocessError) as error:
            return f"git cannot look up commit {commit} here ({_reason(error)})"
        return f"commit {commit} is not part of HEAD's history"

    def _knows(self, *arguments: str) -> bool:
        try:
            self._git(*arguments)
        except subprocess.CalledProcessError:
            return False
        return True

    def _git(self, *arguments: str) -> str:
        return harness.git(*arguments, repository=self._root)


def _reason(error: Exception) -> str:
    told = str(getattr(error, "stderr", None) or error).strip()
    return told.splitlines()[0] if told else type(error).__name__
