# SPDX-License-Identifier: Apache-2.0
import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bench.harness import BenchError
from bench.suites import overhead

LOAD = overhead.Load(batches=6, requests=2, prompt_tokens=8, output_tokens=4, document_tokens=32)
CORES = "(Worker) INFO OpenMP thread binding info: \n\tlocal_rank=0, core ids=[{}]\n"


class _Server:
    """In the place of a server: answers at once, and keeps what it was asked."""

    def __init__(self, name: str, reused: int) -> None:
        self.name, self.model_name, self.base_url = name, "m", name
        self.reused = reused
        self.asked: list[dict[str, Any]] = []
        self.is_halted = False

    @contextmanager
    def halted(self) -> Iterator[None]:
        self.is_halted = True
        yield
        self.is_halted = False

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to stop."""

    def log_text(self) -> str:
        return CORES.format("0, 1" if self.name == "segreuse" else "0")


class _Client:
    def __init__(self, server: _Server, others: list[_Server]) -> None:
        self._server, self._others = server, others
        self.completions = SimpleNamespace(create=self._create)

    async def _create(self, **request: Any) -> Any:
        if len(request["prompt"]) == LOAD.prompt_tokens:  # of a batch
            assert [server.is_halted for server in self._others] == [True]
        assert not self._server.is_halted
        self._server.asked.append(request)
        named = "extra_keys" in request["extra_body"]
        report = {"segreuse": {"reused_tokens": self._server.reused}} if named else None
        return SimpleNamespace(model_extra={"kv_transfer_params": report})

    async def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, _Server]:
    servers = {"plain": _Server("plain", 0), "segreuse": _Server("segreuse", 64)}

    def client(base_url: str, **_: Any) -> _Client:
        others = [server for name, server in servers.items() if name != base_url]
        return _Client(servers[base_url], others)

    monkeypatch.setattr(overhead.openai, "AsyncOpenAI", client)
    return servers


def test_a_ratio_is_of_batches_measured_together() -> None:
    # The machine became ten times slower half way; each pair still says 2 %.
    plain = [1.0] * 4 + [10.0] * 4
    seconds = {"plain": plain, "segreuse": [value / 0.98 for value in plain]}
    figures = overhead.ratio("throughput_ratio", seconds)
    assert list(figures) == [f"throughput_ratio{end}" for end in ("", "_low", "_high")]
    assert list(figures.values()) == pytest.approx([0.98] * 3)


def test_few_batches_have_no_interval() -> None:
    seconds = {"plain": [1.0] * 5, "segreuse": [1.0] * 5}
    with pytest.raises(BenchError, match="5 values are too few"):
        overhead.ratio("throughput_ratio", seconds)


def test_both_servers_get_the_same_batches(servers: dict[str, _Server]) -> None:
    comparison = overhead.Comparison("x", bound=True, beside=1)
    seconds = asyncio.run(overhead.measure(servers, LOAD, comparison))
    assert {name: len(values) for name, values in seconds.items()} == {"plain": 6, "segreuse": 6}
    plain, segreuse = (server.asked for server in servers.values())
    assert [r["prompt"] for r in plain] == [r["prompt"] for r in segreuse]
    # Only what stands beside the batches names a namespace, and only where the plugin is.
    assert not any("extra_keys" in request["extra_body"] for request in plain)
    beside = [r for r in segreuse if "extra_keys" in r["extra_body"]]
    assert {r["max_tokens"] for r in beside} == {1}
    lengths = [r["max_tokens"] for r in segreuse if r not in beside]
    batch = LOAD.requests * [LOAD.output_tokens]
    woken = LOAD.requests * [overhead.WAKING_TOKENS]
    assert lengths == (LOAD.batches + 2) * [*woken, *batch]


def test_traffic_that_reuses_nothing_is_refused(servers: dict[str, _Server]) -> None:
    servers["segreuse"].reused = 0
    comparison = overhead.Comparison("x", bound=True, beside=1)
    with pytest.raises(BenchError, match="reused 0 tokens at the server 'segreuse'"):
        asyncio.run(overhead.measure(servers, LOAD, comparison))


def test_prompts_beside_hold_known_documents_behind_something_new() -> None:
    prompts = overhead.Prompts(LOAD)
    one, other = (prompts.batch(1).beside[0] for _ in range(2))
    assert one[:17] != other[:17]
    text = " ".join(map(str, one))
    assert all(" ".join(map(str, document)) in text for document in prompts.documents)


def test_only_the_plain_server_loads_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def server(model: Path, args: list[str], env: dict[str, str], **options: Any) -> None:
        made.append({"env": env, **options})

    monkeypatch.setattr(overhead, "Server", server)
    monkeypatch.setattr(overhead, "_model", lambda: Path("m"))
    for name in overhead.SERVERS:
        for bound in (True, False):
            overhead.server_of(name, bound, eager=True)
    assert [it["env"].get("VLLM_PLUGINS") for it in made] == ["none", "none", None, None]
    # An empty value unsets it at the server: vLLM binds its threads as it does by default.
    bindings = [it["env"].get("VLLM_CPU_OMP_THREADS_BIND") for it in made]
    assert bindings == [None, "", None, ""]
    assert made[0]["command"] != made[2]["command"]


def test_what_is_hosted_is_what_vllm_runs_alone() -> None:
    beside = yaml.safe_load(overhead.PREFILL.read_text())["beside"]
    assert beside == overhead.TRANSFER


def test_both_servers_of_a_part_have_what_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[str], dict[str, str]]] = []

    def server(model: Path, args: list[str], env: dict[str, str], **_: Any) -> None:
        made.append((args, env))

    monkeypatch.setattr(overhead, "Server", server)
    monkeypatch.setattr(overhead, "_model", lambda: Path("m"))
    monkeypatch.setattr(overhead.os, "sched_getaffinity", lambda _: {0, 3, 5})
    for part in (overhead.STAGES, overhead.HOSTED):
        for name in overhead.SERVERS:
            overhead.server_of(name, True, False, part)
    overhead.server_of(overhead.IDLE, True, False, overhead.STAGES)
    args, env = made.pop()
    assert args[-2:] == ["--kv-transfer-config", json.dumps(overhead.NOTHING)]
    assert str(overhead.harness.REPOSITORY) in env["PYTHONPATH"].split(":")
    assert env["VLLM_PLUGINS"] == "none"
    for args, env in made[:2]:
        assert args[-2:] == ["--pipeline-parallel-size", "2"]
        assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0|3"
    (alone, first), (hosted, second) = made[2:]
    assert alone[-2:] == ["--kv-transfer-config", json.dumps(overhead.TRANSFER)]
    assert hosted[-2:] == ["--segreuse-config", str(overhead.PREFILL)]
    port = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    assert first[port] != second[port]
    monkeypatch.setattr(overhead.os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(BenchError, match="two pipeline stages need two cores"):
        overhead.server_of("plain", True, False, overhead.STAGES)


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        (None, ["throughput_ratio", "throughput_ratio_bound", "throughput_ratio_beside_reuse"]),
        (["stages"], ["throughput_ratio_stages"]),
        (["hosted", "stages"], ["throughput_ratio_stages", "throughput_ratio_hosted"]),
    ],
)
def test_parts_are_measured_where_they_are_asked_for(
    parts: list[str] | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of one kind are started once."""
    started: list[tuple[str, bool, bool, str]] = []
    asked: list[str] = []

    def server_of(*given: Any) -> Any:
        started.append(given)
        return nullcontext(SimpleNamespace(log_text=lambda: ""))

    async def measure(_: Any, __: Any, comparison: overhead.Comparison) -> Any:
        asked.append(comparison.name)
        return {name: [1.0] * 8 for name in comparison.servers}

    monkeypatch.setattr(overhead, "server_of", server_of)
    monkeypatch.setattr(overhead, "measure", measure)
    result = overhead.run(True, parts)
    assert asked == names
    assert set(names) <= result["summary"].keys()
    assert len(started) == len(set(started)) == {None: 4, 1: 3, 2: 5}[parts and len(parts)]
    assert all(eager is (part != overhead.STAGES) for _, _, eager, part in started)


def test_what_a_connector_costs_is_told_apart_over_several_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def server_of(name: str, *_: Any) -> Any:
        started.append(name)
        return nullcontext(SimpleNamespace(log_text=lambda: ""))

    async def measure(servers: Any, load: overhead.Load, _: Any) -> Any:
        assert [*servers] == ["plain", "segreuse", "idle"]
        slower = {"plain": 1.0, "segreuse": 2.0, "idle": 1.25}
        return {name: [slower[name]] * load.batches for name in servers}

    monkeypatch.setattr(overhead, "server_of", server_of)
    monkeypatch.setattr(overhead, "measure", measure)
    result = overhead.run(False, ["stages"])
    assert started == ["plain", "segreuse", "idle"] * 4
    summary = result["summary"]
    assert summary["throughput_ratio_stages"] == 0.5
    assert summary["throughput_ratio_stages_idle"] == 0.8
    assert sum(row["batches"] for row in result["rows"]) == 3 * overhead.FULL.batches


def test_the_cores_that_compute_are_those_of_the_log() -> None:
    assert overhead.compute_cores(CORES.format("0, 1, 2")) == 3
    assert overhead.compute_cores("no word of it") is None


def test_every_comparison_is_in_the_summary(
    servers: dict[str, _Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "QUICK", LOAD)
    monkeypatch.setattr(overhead, "server_of", lambda name, *_: servers[name])
    result = overhead.run(quick=True)
    ends = ("", "_low", "_high")
    names = ("throughput_ratio", "throughput_ratio_bound", "throughput_ratio_beside_reuse")
    assert list(result["summary"]) == [f"{name}{end}" for name in names for end in ends]
    assert [row["compute_cores"] for row in result["rows"]] == [1, 2] * 3
