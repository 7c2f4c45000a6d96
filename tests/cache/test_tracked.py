# SPDX-License-Identifier: Apache-2.0
"""What is kept of a request is that of its tokens, and nobody's else."""

import numpy as np
import pytest

from tests.cache.test_planner import new_only
from vllm_segreuse.cache import tracked as tracked_module
from vllm_segreuse.cache.matcher import Matches
from vllm_segreuse.cache.rolling_hash import window_hashes
from vllm_segreuse.cache.tracked import Memo, Report, TrackedRequest


def request(number: int) -> TrackedRequest:
    return TrackedRequest("r", 0, 4, new_only, np.arange(number, dtype=np.int32))


def test_a_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = request(9)
    first = tracked.hashes(4)
    assert first.tolist() == window_hashes(tracked.tokens, 4).tolist()
    monkeypatch.setattr(tracked_module, "window_hashes", pytest.fail)
    assert tracked.hashes(4) is first


def test_other_tokens_have_other_hashes_and_matches() -> None:
    tracked = request(9)
    tracked.hashes(4)
    tracked.memo = Memo((0, 8, 1), Matches(np.zeros((0, 5), np.int32), 0, 0, 0))
    longer = np.arange(50, 62, dtype=np.int32)
    tracked.retoken(longer)
    assert tracked.tokens is longer
    assert tracked.hashes(4).tolist() == window_hashes(longer, 4).tolist()
    assert tracked.memo is None


def test_unless_it_is_told_otherwise_a_request_donates_and_all_of_it_was_computed() -> None:
    tracked = request(3)
    assert (tracked.donates, tracked.bypass, tracked.plan, tracked.start) == (True, None, None, 0)
    report = Report(0, 0, 0, 3, 0, "no_match")
    assert (report.exact_tokens, report.computed_share) == (0, 1.0)
