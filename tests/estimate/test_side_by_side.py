# SPDX-License-Identifier: Apache-2.0
"""Sizes that are simulated in several processes come to what they come to in one."""

import multiprocessing
import os
import random
import signal

import numpy as np
import pytest

from segreuse_tools.estimate import side_by_side
from segreuse_tools.estimate.gain import GainSetting, Simulation, SizeRow
from segreuse_tools.estimate.prompts import PromptTokens
from segreuse_tools.estimate.request_log import LogError
from segreuse_tools.estimate.side_by_side import SideBySide
from vllm_segreuse.options.request import PolicyOptions

SIZES = (400, 2000, None)
SETTING = GainSetting(SIZES, 16, ("shift",), 4, 1, "session", 0, 4, PolicyOptions())


def prompts(count: int) -> list[PromptTokens]:
    """Of three passages each, of a few."""
    rng = random.Random(7)
    passages = [[rng.randrange(9000) for _ in range(60)] for _ in range(12)]
    texts = [np.concatenate((*rng.sample(passages, 3), [number])) for number in range(count)]
    return [PromptTokens(text.astype(np.int32), 2, None, []) for text in texts]


def in_one(given: list[PromptTokens]) -> list[SizeRow]:
    simulation = Simulation(SETTING)
    for prompt in given:
        simulation.run(prompt)
    return [*simulation.rows()]


@pytest.mark.parametrize(
    ("count", "processes"),
    [
        (9, 3),
        *(pytest.param(*some, marks=pytest.mark.slow) for some in ((10, 2), (20, 2), (37, 9))),
        (37, 3),
        (20, 1),
    ],
)
def test_the_rows_are_those_of_one_process(
    count: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "SHORT", 10)
    monkeypatch.setattr(side_by_side, "TOGETHER", 4)
    given = prompts(count)
    with SideBySide(SETTING, processes) as sizes:
        for prompt in given:
            sizes.run(prompt)
        sizes.finish()
        started = len(multiprocessing.active_children())
        rows = [*sizes.rows()]
        counted = sizes.own.requests, sizes.own.prompt_tokens
    assert rows == in_one(given)
    assert started == (min(processes, len(SIZES)) - 1 if count >= 10 else 0)
    assert [row.cache_tokens for row in rows] == [*SIZES]
    assert counted == (count, sum(len(prompt.tokens) for prompt in given))


def test_a_process_that_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "SHORT", 2)
    with SideBySide(SETTING, 2) as sizes:
        for prompt in prompts(3):
            sizes.run(prompt)
        sizes.finish()
        for process in multiprocessing.active_children():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(LogError, match="name smaller or fewer --cache-tokens"):
            [*sizes.rows()]
