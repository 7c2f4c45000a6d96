# SPDX-License-Identifier: Apache-2.0
"""What a request is counted to take of the KV cache is what vLLM asks for."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_segreuse.engine.kv_slots import KvSlots


@pytest.mark.parametrize(("drafts", "behind", "ahead"), [(0, 0, 1), (5, 0, 6), (5, 5, 11)], ids=str)
def test_drafts_and_what_is_written_behind_them_take_slots(
    drafts: int, behind: int, ahead: int
) -> None:
    config: Any = SimpleNamespace(
        num_speculative_tokens=drafts,
        num_lookahead_tokens=behind,
        model_config=SimpleNamespace(max_model_len=64),
    )
    slots = KvSlots.of(config)
    assert slots.needed(20) == 20 + ahead
    assert slots.needed(62) == min(62 + ahead, 64), "nothing is written behind the last position"
