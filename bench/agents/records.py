# SPDX-License-Identifier: Apache-2.0
"""Traces that were compared with full prefill, line by line in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import records
from bench.agents.arms import Arm
from bench.agents.tokens import Tokens
from bench.agents.traces import Trace

Key = tuple[str, str, int, tuple[str, ...]]
"""Part, kind and number of a trace, names of the arms that shared an engine."""


class Compared:
    """Steps of whole traces, in memory and, with a file, on disk.

    Args:
        file: where they are; None: nowhere.
        setting: what must be equal for traces to belong together.
        commit: of the code that runs.
        any_commit: whether traces of other code are gone on with.

    Raises:
        RecordsError: the file is of another setting or other code, or holds something else.
    """

    def __init__(
        self,
        file: Path | None,
        setting: Mapping[str, Any],
        commit: str | None,
        any_commit: bool = False,
    ) -> None:
        self._file, self._commit = file, commit
        self._steps: dict[Key, list[Any]] = {}
        self.commits = {commit}
        if file is None:
            return
        found = set()
        entries = records.opened(file, "agents", setting)
        for key, steps, its_commit in records.each(file, entries, _of_a_trace):
            self._steps[key] = steps
            found.add(its_commit)
        records.require_commit(file, found, commit, any_commit)
        self.commits |= found

    def steps(self, part: str, trace: Trace, arms: Sequence[Arm], kind: type[Any]) -> Any | None:
        """Steps of a trace under arms, each a `kind`; None: they were not measured."""
        found = self._steps.get(_key(part, trace, arms))
        if found is None:
            return None
        return [kind(**{**one, "tokens": Tokens(**one["tokens"])}) for one in found]

    def add(self, part: str, trace: Trace, arms: Sequence[Arm], steps: Sequence[Any]) -> None:
        """All steps of a trace were measured."""
        _, _, _, names = key = _key(part, trace, arms)
        self._steps[key] = told = [asdict(one) for one in steps]
        if self._file is not None:
            entry = {"part": part, "kind": trace.kind, "number": trace.number, "arms": names}
            records.append(self._file, entry | {"commit": self._commit, "steps": told})


def _of_a_trace(entry: Mapping[str, Any]) -> tuple[Key, list[Any], str | None]:
    """From a line of a file: whose steps, these, and their commit."""
    key = (entry["part"], entry["kind"], entry["number"], tuple(entry["arms"]))
    return key, entry["steps"], entry["commit"]


def _key(part: str, trace: Trace, arms: Sequence[Arm]) -> Key:
    return part, trace.kind, trace.number, tuple(arm.name for arm in arms)
