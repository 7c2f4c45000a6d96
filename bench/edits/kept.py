# SPDX-License-Identifier: Apache-2.0
"""What was asked, conversation by conversation in a file: a run that stopped goes on behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.agents.tokens import Tokens
from bench.edits.serving import Asked

COMMAND = "edits"


class Kept:
    """Questions of whole conversations, in memory and, with a file, on disk.

    Attributes:
        asked: all of them.
        conversations: numbers of those that are done.
        commits: of the code that asked.
    """

    def __init__(self, file: Path | None, setting: Mapping[str, Any], commit: str | None) -> None:
        """
        Args:
            file: begun where there is none; None: nothing is kept.
            setting: what must be equal for conversations to belong together.
            commit: of this run.

        Raises:
            RecordsError: the file is of another setting or other code, or holds something else.
        """
        self.asked: list[Asked] = []
        self.conversations: set[int] = set()
        self.commits: set[str | None] = set()
        self._file, self._commit = file, commit
        if file:
            for kept in records.each(file, records.opened(file, COMMAND, setting), _conversation):
                self._take(*kept)
            records.require_commit(file, self.commits, commit, any_commit=False)

    def add(self, conversation: int, asked: Sequence[Asked]) -> None:
        """One more, of which all was asked."""
        self._take(conversation, self._commit, asked)
        if self._file:
            told = [{**vars(one), "tokens": vars(one.tokens)} for one in asked]
            entry = {"conversation": conversation, "commit": self._commit, "asked": told}
            records.append(self._file, entry)

    def _take(self, conversation: int, commit: str | None, asked: Sequence[Asked]) -> None:
        self.asked += asked
        self.conversations.add(conversation)
        self.commits.add(commit)


def _conversation(entry: Mapping[str, Any]) -> tuple[int, str | None, list[Asked]]:
    """From a line of a file: which one, at which commit, and what was asked."""
    return entry["conversation"], entry["commit"], [_read(one) for one in entry["asked"]]


def _read(entry: Mapping[str, Any]) -> Asked:
    return Asked(**{**entry, "tokens": Tokens(**entry["tokens"])})
