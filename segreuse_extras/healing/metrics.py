# SPDX-License-Identifier: Apache-2.0
"""Metrics of healing."""

from typing import Literal, get_args

from prometheus_client import Counter

from vllm_segreuse.engine.metrics import Metric

Outcome = Literal["healed", "overtaken", "forgotten"]

METRICS = (
    Metric(
        "healed_tokens_total",
        Counter,
        "Tokens that were computed in full while the engine was idle (heal_tokens).",
    ),
    Metric(
        "healings_total",
        Counter,
        "Turns that held moved text: all of it was computed in full (healed), a later turn came "
        "first (overtaken), or too many waited, the cache was reset, there was no room, or its "
        "LoRA adapter is gone (forgotten).",
        {"outcome": get_args(Outcome)},
    ),
)
