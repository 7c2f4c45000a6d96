# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.core.single_type_kv_cache_manager.SlidingWindowManager`: layers with a window get blocks
for all that a plan supplies, until the step after.

vLLM gives them blocks for the last window only of what a connector supplies. A pass computes tokens
anywhere in it, and each of them attends to the window in front of it. So for the time of that
allocation windows end where the plan begins; the next allocation for the request frees what is in
front of its window, as after a chunk of prefill.

Obsolete when a connector can say from which token on it needs blocks of every group. None filed
that we know of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from vllm_segreuse.compat.block_pool import SegmentBlockPool
from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap the one function that says what a window has passed, once."""
    wrap(SlidingWindowManager, "get_num_skipped_tokens", _get_num_skipped_tokens)


def _get_num_skipped_tokens(original: Callable[..., int]) -> Callable[..., int]:
    # Called for each running request in every step, with this argument alone.
    def get_num_skipped_tokens(self: Any, num_computed_tokens: int) -> int:
        pool = self.block_pool
        if isinstance(pool, SegmentBlockPool) and pool.window_end is not None:
            num_computed_tokens = min(num_computed_tokens, pool.window_end)
        return original(self, num_computed_tokens)

    return get_num_skipped_tokens
