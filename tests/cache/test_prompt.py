# SPDX-License-Identifier: Apache-2.0
"""What is kept of a prompt is that of its tokens, and of no others."""

import math

import numpy as np
import pytest

from tests.cache.test_planner import World, new_only
from vllm_segreuse.cache import prompt as prompt_module
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.prompt import Memo, Prompt
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.plan import Pieces
from vllm_segreuse.scheduling.tracked import Decision, Method, Report, TrackedRequest


def prompt(number: int) -> Prompt:
    return Prompt(0, np.arange(number, dtype=np.int32))


def test_a_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = prompt(9)
    first = made.hashes(4)
    assert first.tolist() == window_hashes(made.tokens, 4).tolist()
    monkeypatch.setattr(prompt_module, "window_hashes", pytest.fail)
    assert made.hashes(4) is first


def test_other_tokens_have_other_hashes_and_matches() -> None:
    def resident(first: int, last: int) -> np.ndarray:
        return np.arange(first, last, dtype=np.int32)

    made = Prompt(3, np.arange(9, dtype=np.int32), resident)
    made.hashes(4)
    made.memo = Memo((0, 8, 1), Matches(Pieces.from_table([]), 0, 0, 0))
    tokens = np.arange(50, 62, dtype=np.int32)
    longer = made.with_tokens(tokens)
    assert longer.tokens is tokens
    assert longer.hashes(4).tolist() == window_hashes(tokens, 4).tolist()
    assert longer.memo is None
    assert (longer.namespace, longer.resident_blocks) == (3, resident)


def test_unless_it_is_known_otherwise_no_block_is_resident() -> None:
    assert prompt(3).resident_blocks(2, 5).tolist() == [-1, -1, -1]


def test_by_default_a_request_donates_and_all_of_it_was_computed_once() -> None:
    tracked = TrackedRequest("r", prompt(3), Method("test", World().finder, new_only, 4))
    assert (tracked.donates, tracked.bypass, tracked.plan) == (True, None, None)
    assert tracked.decision == Decision()
    assert (tracked.num_tokens, tracked.method.max_drift) == (3, math.inf)
    report = Report(0, 0, 0, 3, 0, "no_match")
    assert (report.exact_tokens, report.computed_share) == (0, 1.0)
    assert (report.drift, report.in_full) == (None, False)
