# SPDX-License-Identifier: Apache-2.0
"""Sizes of the arms of `bench tier`, and what it reads of a server's metrics."""

from bench.suites import tier

METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="m"} 12.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 30.0
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 7.0
"""


def test_prompt_tokens_of_all_engines_are_added_up() -> None:
    assert tier.prompt_tokens(METRICS) == 42


def test_nothing_counted_is_zero() -> None:
    assert tier.prompt_tokens("") == 0


def test_the_base_is_five_times_larger_than_the_kv_memory() -> None:
    sizes = tier.Sizes(base_blocks=3000, block_bytes=1 << 20)
    assert sizes.small_blocks - 1 == 600
    assert sizes.small_gib * (1 << 30) == 600 << 20
    assert sizes.all_gib * (1 << 30) >= 3000 << 20
