# SPDX-License-Identifier: Apache-2.0
"""What stands for the engine of `bench english` in tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from bench.english import engine


class Words:
    """Stands for `Prompts`: a word is a token."""

    chat = True

    def measure(self, passage: str) -> int:
        return len(passage.split())

    def prompt(self, documents: Sequence[str], question: str) -> list[int]:
        return [0] * sum(map(self.measure, [*documents, question]))


def use_lab(monkeypatch: pytest.MonkeyPatch, lab: Any) -> None:
    """Ask `lab` instead of an engine, the examples of the usual seeds."""

    @contextmanager
    def english_engine(*_: Any) -> Iterator[Any]:
        yield lab

    monkeypatch.setattr(engine, "english_engine", english_engine)
    monkeypatch.delenv("BENCH_QUALITY_SEEDS", raising=False)
