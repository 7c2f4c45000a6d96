# SPDX-License-Identifier: Apache-2.0
"""Sizes of the arms of `bench tier`, and what it reads of a server's metrics."""

import pytest

from bench import harness
from bench.server import ServerError
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


def test_parts_are_run_as_named_and_all_of_them_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def measures(_: bool) -> dict[str, tier.Callable[[], harness.SuiteResult]]:
        return {
            name: lambda name=name: {"rows": [{"part": name}], "summary": {name: 1}}
            for name in tier.PARTS
        }

    assert tier.measures_of(True).keys() == {*tier.PARTS}
    monkeypatch.setattr(tier, "measures_of", measures)
    assert tier.run(True)["summary"].keys() == {*tier.PARTS}
    some = tier.run(True, ["speed", "soak"])
    assert [row["part"] for row in some["rows"]] == ["speed", "soak"]
    assert some["summary"] == {"speed": 1, "soak": 1}


def test_a_server_that_fails_is_an_error_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: tier.Load) -> harness.SuiteResult:
        raise ServerError("it did not start")

    monkeypatch.setattr(tier, "throughput", fails)
    with pytest.raises(harness.BenchError, match="it did not start"):
        tier.run(True, ["throughput"])
