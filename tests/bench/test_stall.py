# SPDX-License-Identifier: Apache-2.0
import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import harness, streams
from bench.suites import stall


def test_ratios_are_against_full_prefill_at_the_same_server() -> None:
    seen = {
        ("at once", "full"): streams.Beside([10.0] * 98 + [20.0, 40.0], [100.0]),
        ("at once", "hybrid"): streams.Beside([20.0] * 98 + [60.0, 200.0], [50.0]),
        ("spread", "full"): streams.Beside([1.0, 1.0], [1.0]),
        ("spread", "hybrid"): streams.Beside([3.0, 3.0], [5.0]),
    }
    assert stall.figures(seen) == {
        "beside_p50_ratio_hybrid_at_once": 2.0,
        "beside_p99_ratio_hybrid_at_once": 3.0,
        "beside_max_ratio_hybrid_at_once": 5.0,
        "ttft_ratio_hybrid_at_once": 0.5,
        "beside_p50_ratio_hybrid_spread": 3.0,
        "beside_p99_ratio_hybrid_spread": 3.0,
        "beside_max_ratio_hybrid_spread": 3.0,
        "ttft_ratio_hybrid_spread": 5.0,
    }


class _Server:
    """Reuses a share of the known tokens of prompts that name extra keys."""

    base_url = model_name = ""

    def __init__(self, config: str, reuses: float) -> None:
        self.config = config
        self.reuses = reuses
        self.reused = 0.0
        self.is_halted = False

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to stop."""

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        self.is_halted = True
        yield
        self.is_halted = False

    def read(self, path: str) -> str:
        assert path == "/metrics"
        return f'vllm:segreuse_tokens_total{{engine="0",kind="reused"}} {self.reused}\n'


class _Asked:
    """Stands for servers and what is asked of them: arm, policy and number of prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reuses: float = 1.0) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.known: list[_Server] = []
        self._servers: list[_Server] = []
        monkeypatch.setattr(stall, "FULL", stall.FULL._replace(prompts=3, rounds=4))
        monkeypatch.setattr(stall.shapes, "make_model", lambda name: name)
        monkeypatch.setattr(stall, "_server", lambda *of: self._server(of[-1], reuses))
        texts = SimpleNamespace(known_tokens=100)
        monkeypatch.setattr(stall.streams, "Texts", lambda *_: texts)
        monkeypatch.setattr(stall.streams, "know", lambda server, *_: self.known.append(server))
        monkeypatch.setattr(stall.streams, "decode_beside", self._decode_beside)

    def _server(self, config: Path, reuses: float) -> _Server:
        self._servers.append(_Server(config.read_text(), reuses))
        return self._servers[-1]

    async def _decode_beside(
        self, server: _Server, texts: Any, body: dict[str, Any], number: int, prompts: int
    ) -> streams.Beside:
        assert [it for it in self._servers if not it.is_halted] == [server]
        assert self.known[-1] is server, "`full` prompts have driven documents out"
        xargs = body.get("vllm_xargs", {})
        if xargs:
            server.reused += server.reuses * prompts * texts.known_tokens
        policy = (xargs.get("segreuse_policy", "full"), xargs.get("segreuse_recompute_ratio"))
        self.asked.append((server.config, str(policy), prompts))
        return streams.Beside([float(len(self.asked))], [1.0] * prompts)


def test_arms_and_policies_take_turns_and_all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Asked(monkeypatch).asked
    result = stall.run(quick=False)
    cells = len(stall.ARMS) * len(stall.POLICIES)
    assert len(asked) == cells + 4 * cells
    measured = asked[cells:]
    assert len(set(measured[:cells])) == cells, "every round asks each cell once"
    assert len({measured[cells * turn] for turn in range(4)}) == 4, "and another one first"
    assert {config for config, _, _ in asked} == {'{"spread_tokens": 0}', '{"spread_tokens": null}'}
    assert [row["prompts"] for row in result["rows"]] == [12] * cells
    assert result["summary"]["prompts"] == 12


def test_a_policy_that_has_not_reused_what_was_known_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Asked(monkeypatch, reuses=0.8)
    with pytest.raises(harness.BenchError, match="policy default reused 80 of 100 tokens"):
        stall.run(quick=False)


def test_gaps_count_while_a_prompt_is_in_flight() -> None:
    prompts = [(2.0, 4.0), (7.0, 8.0)]
    gaps = [(0.0, 2.0), (1.0, 2.5), (2.5, 3.5), (3.9, 5.0), (4.0, 7.0), (6.0, 9.0), (8.0, 9.0)]
    assert streams.overlapping_ms(gaps, prompts) == pytest.approx([1500, 1000, 1100, 3000])


class _Decoding:
    """An OpenAI client and its server: a step takes 1 s, and 100 s while a prompt is computed."""

    steps_left = 0
    now_s = 0.0

    def __init__(self, **_: Any) -> None:
        self.completions = self

    async def __aenter__(self) -> "_Decoding":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    async def create(self, max_tokens: int, stream: bool = False, **_: Any) -> Any:
        if stream:
            return self._tokens(max_tokens)
        self.steps_left = 5
        while self.steps_left:
            await _pass_on()
        return None

    async def _tokens(self, number: int) -> AsyncIterator[None]:
        for _ in range(number):
            await _pass_on()
            _Decoding.now_s += 100.0 if self.steps_left else 1.0
            self.steps_left = max(0, self.steps_left - 1)
            yield


_pass_on = functools.partial(asyncio.sleep, 0)


def test_what_is_decoded_between_prompts_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rest(_: float) -> None:
        for _ in range(10):
            await _pass_on()

    monkeypatch.setattr(streams.openai, "AsyncOpenAI", _Decoding)
    monkeypatch.setattr(streams.asyncio, "sleep", rest)
    monkeypatch.setattr(streams.time, "perf_counter", lambda: _Decoding.now_s)
    server, texts = _Server("", 1.0), SimpleNamespace(prompt=lambda: "")
    seen = asyncio.run(streams.decode_beside(server, texts, {}, 1, 3))  # type: ignore[arg-type]
    assert seen.gaps_ms.count(100e3) == 3 * 5
    assert len(seen.gaps_ms) <= 3 * 7, "at most a step that begins or ends beside a prompt"
    assert len(seen.ttft_ms) == 3
    assert min(seen.ttft_ms) >= 500e3


@pytest.mark.parametrize("policy", stall.POLICIES)
def test_only_full_prompts_name_no_extra_keys(policy: str) -> None:
    body = stall.body_of(stall.POLICIES[policy])
    assert bool(body) == (policy != "full")
