# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from bench import streams
from bench.suites import stall


def test_ratios_are_against_full_prefill_at_the_same_server() -> None:
    seen = {
        ("at once", "full"): streams.Beside([10.0] * 98 + [20.0, 40.0], [100.0]),
        ("at once", "hybrid"): streams.Beside([20.0] * 98 + [60.0, 200.0], [50.0]),
        ("spread", "full"): streams.Beside([1.0, 1.0], [1.0]),
        ("spread", "hybrid"): streams.Beside([3.0, 3.0], [5.0]),
    }
    assert stall.figures(seen) == {
        "itl_p50_ratio_hybrid_at_once": 2.0,
        "itl_p99_ratio_hybrid_at_once": 3.0,
        "itl_max_ratio_hybrid_at_once": 5.0,
        "ttft_ratio_hybrid_at_once": 0.5,
        "itl_p50_ratio_hybrid_spread": 3.0,
        "itl_p99_ratio_hybrid_spread": 3.0,
        "itl_max_ratio_hybrid_spread": 3.0,
        "ttft_ratio_hybrid_spread": 5.0,
    }


class _Server:
    def __init__(self, config: str) -> None:
        self.config = config

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to stop."""


def test_arms_and_policies_take_turns_and_all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []

    async def decode_beside(
        server: _Server, texts: Any, body: dict[str, Any], number: int, prompts: int
    ) -> streams.Beside:
        xargs = body.get("vllm_xargs", {})
        policy = (xargs.get("segreuse_policy", "full"), xargs.get("segreuse_recompute_ratio"))
        asked.append((server.config, str(policy), prompts))
        return streams.Beside([float(len(asked))], [1.0] * prompts)

    monkeypatch.setattr(stall, "FULL", stall.FULL._replace(prompts=3, rounds=4))
    monkeypatch.setattr(stall.shapes, "make_model", lambda name: name)
    monkeypatch.setattr(stall, "_server", lambda model, load, config: _Server(config.read_text()))
    monkeypatch.setattr(stall.streams, "Texts", lambda *_: None)
    monkeypatch.setattr(stall.streams, "know", lambda *_: None)
    monkeypatch.setattr(stall.streams, "decode_beside", decode_beside)
    result = stall.run(quick=False)
    cells = len(stall.ARMS) * len(stall.POLICIES)
    assert len(asked) == cells + 4 * cells
    measured = asked[cells:]
    assert len(set(measured[:cells])) == cells, "every round asks each cell once"
    assert len({measured[cells * turn] for turn in range(4)}) == 4, "and another one first"
    assert {config for config, _, _ in asked} == {'{"spread_tokens": 0}', '{"spread_tokens": null}'}
    assert [row["prompts"] for row in result["rows"]] == [12] * cells
    assert result["summary"]["prompts"] == 12


@pytest.mark.parametrize("policy", stall.POLICIES)
def test_only_full_prompts_name_no_extra_keys(policy: str) -> None:
    body = stall._body(stall.POLICIES[policy])
    assert bool(body) == (policy != "full")
