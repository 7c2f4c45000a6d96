# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks, each in a process of its own, and what one worker answers instead.

A module of tests is run once more as a script, which starts the engine and writes its answers:
`run_script` reads them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import NAMESPACE, Answer, Engine, Prompts
from tests.e2e.test_equality import assert_same

Answers = dict[str, list[Answer]]
"""By the way in which they were asked for."""
Ways = Mapping[str, dict[str, Any] | None]
"""Options of requests; None: of plain ones."""

CORES = sorted(os.sched_getaffinity(0))
NOISE = 2e-3  # of float32
PREPARING = "vllm_segreuse.prefill.executor.token_copies"


def needs_two_cores(what: str, ranks: str = "one per rank") -> pytest.MarkDecorator:
    """Skips tests of an engine of several ranks where they would share one core."""
    return pytest.mark.skipif(
        len(CORES) < 2, reason=f"{what} needs 2 CPUs, {ranks}; there is {len(CORES)}"
    )


class Asking:
    """The same two prompts, of the same two documents, of any engine.

    Args:
        running: the engine.
        ways: to ask it.
        seed: of the texts.
    """

    def __init__(self, running: Engine, ways: Ways, seed: int = 31) -> None:
        self.running, self.ways = running, ways
        text = Prompts(running.vocab_size, seed=seed)
        self.documents = [text.tokens(300), text.tokens(200)]
        first, second = self.documents
        self.prompts = [text.around(second, first), text.around(first)]

    def cache(self, way: str) -> None:
        """Nothing but what a way reuses is cached: exact documents."""
        self.running.reset()
        if self.ways[way] is not None:
            self.running.ask(*self.documents, options=NAMESPACE, max_tokens=1)

    def ask(self, way: str) -> list[Answer]:
        """Both prompts, together, of what is cached now."""
        return self.running.ask(*self.prompts, options=self.ways[way])

    def ask_every_way(self) -> Answers:
        """With the documents exact each time."""
        found = {}
        for way in self.ways:
            self.cache(way)
            found[way] = self.ask(way)
        return found

    def ask_broken(self, way: str, rank: int) -> list[Answer]:
        """Where one rank cannot prepare the first plan."""
        self.cache(way)
        self.running.llm.collective_rpc("break_on_rank", args=(rank, PREPARING))
        return self.ask(way)


class Breaking:
    """What vLLM adds to its workers (`worker_extension_cls`)."""

    def break_on_rank(self, rank: int, name: str) -> None:
        """Let a function of ours raise on one rank, the first time only."""
        if self.rank == rank:  # type: ignore[attr-defined]
            patch = pytest.MonkeyPatch()

            def raising(*args: Any, **kwargs: Any) -> Any:
                patch.undo()
                raise ArithmeticError(f"on purpose, in {name} on rank {rank}")

            patch.setattr(name, raising)


def write_answers(path: Path, found: Answers) -> None:
    """What `run_script` reads."""
    plain = {way: [dataclasses.asdict(each) for each in given] for way, given in found.items()}
    path.write_text(json.dumps(plain))


def run_script(module: str, path: Path, ranks: int = 2) -> tuple[Answers, str]:
    """Runs a module of tests as a script, whose ranks share two cores.

    Args:
        path: where it writes its answers.
        ranks: of its engine.

    Returns:
        These, and all that it wrote besides.
    """
    cores = "|".join(str(CORES[rank % 2]) for rank in range(ranks))
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": cores}
    done = subprocess.run(
        [sys.executable, "-m", module, str(path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    assert path.exists(), done.stdout[-6000:]
    answers = json.loads(path.read_text()).items()
    return {way: [_answer(each) for each in found] for way, found in answers}, done.stdout


def _answer(fields: dict[str, Any]) -> Answer:
    logprobs = [{int(t): p for t, p in step.items()} for step in fields.pop("logprobs")]
    return Answer(logprobs=logprobs, **fields)


def assert_as_one(several: list[Answer], one: list[Answer]) -> None:
    """Several ranks answer, and report, as one worker does."""
    for ours, reference in zip(several, one, strict=True):
        assert ours.report == reference.report
        assert_same(ours, reference, NOISE)


def assert_all_recomputed(several: list[Answer], plain: list[Answer]) -> None:
    """Whoever recomputes all that it reuses answers as one that reuses nothing."""
    for ours, reference in zip(several, plain, strict=True):
        assert ours.report["recomputed_tokens"] == ours.report["reused_tokens"] >= 288
        assert_same(ours, reference, NOISE)


def assert_mended(broken: list[Answer], plain: list[Answer], rank: int, log: str) -> None:
    """What one rank could not prepare is computed in full."""
    for ours, reference in zip(broken, plain, strict=True):
        assert ours.report["reused_tokens"]
        assert_same(ours, reference, NOISE)
    assert f"on purpose, in {PREPARING} on rank {rank}" in log


def assert_comparison_can_fail(found: Answers, *pairs: tuple[str, str]) -> None:
    """Another choice of tokens answers differently, far beyond the noise."""
    for way, other in pairs:
        with pytest.raises(AssertionError, match="log-probabilities differ"):
            assert_same(found[way][0], found[other][0], 5 * NOISE)
